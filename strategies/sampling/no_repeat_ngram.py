"""No repeated n-grams."""
from collections.abc import Iterator

import torch

from playground.algorithms.sampling.repetition import among, echoes
from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED
from playground.events import Event, Figure, Note


class NoRepeatNgram(Sampler):
    """Never write the same n tokens in a row twice, prompt included: what would complete such a repeat is removed.

    At n = 1 no token may come back, at n = 0 everything may. Where nothing would be left, the row stays as it is. The
    choice stays argmax unless another sampler draws. It forbids names and set phrases too: the price of a small n.
    Paulus et al. 2017, arXiv 1705.04304.
    """

    name, title, paper, sheet = "no_repeat_ngram", "No repeated n-gram", "1705.04304", "sampling/sampling-baselines"
    stage, rank, draws = "penalty", 2, False
    guarantee = ("collapses",)

    n: int = knob(3, 0, 8, step=1, help="tokens in a row that may not come twice; 0 allows everything")

    def apply(self, scores, histories):
        return (
            torch.stack([self._without_repeats(row, history) for row, history in zip(scores, histories)])
            if self.n
            else scores
        )

    def _without_repeats(self, row: torch.Tensor, history: list[int]) -> torch.Tensor:
        banned, _ = among(self.banned(history), len(row))
        left = row.index_fill(0, torch.tensor(banned, dtype=torch.long, device=row.device), REMOVED)
        return left if bool((left > REMOVED).any()) else row

    def banned(self, history: list[int]) -> dict[int, int]:
        """Tokens that would complete a repeated n-gram."""
        return {token: length for token, length in echoes(history, self.n - 1).items() if length == self.n - 1}

    def explain(self, scores, history, token) -> Iterator[Event]:
        best = int(scores.argmax())
        if not self.n or best == token or best not in self.banned(history):
            return
        repeat = "".join(map(self.piece, [*history[len(history) - self.n + 1:], best]))
        place = len(history) - self.start
        yield Figure("spans", "repeats that were forbidden", {"spans": [[place, place + 1, repeat, self.n]]})
        yield Note(f"{self.piece(best)!r} would have written {repeat!r} a second time, so it is {self.piece(token)!r}.")
