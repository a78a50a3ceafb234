"""No repeated n-grams."""
from collections.abc import Iterator

import torch

from playground.algorithms.sampling.repetition import in_vocabulary, repeat_lengths, repeats
from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED, first_largest
from playground.events import Event, Figure, Note


class NoRepeatNgram(Sampler):
    """Remove tokens that would complete an n-gram that occurred before, prompt included.

    At n = 1 no token may occur twice, at n = 0 nothing is removed. If no token would remain, the row is unchanged. The
    choice stays argmax unless another sampler draws. A small n also forbids names and set phrases. Paulus et al. 2017,
    arXiv 1705.04304.
    """

    name, title, paper, sheet = "no_repeat_ngram", "No repeated n-gram", "1705.04304", "sampling/sampling-baselines"
    stage, rank, draws = "penalty", 2, False
    guarantee = ("collapses",)

    n: int = knob(3, 0, 8, step=1, help="length of the n-grams that may not occur twice; 0 allows everything")

    def apply(self, scores, histories):
        if not self.n:
            return scores
        return torch.stack([self._without_repeats(row, history) for row, history in zip(scores, histories)])

    def _without_repeats(self, row: torch.Tensor, history: list[int]) -> torch.Tensor:
        banned, _ = in_vocabulary(self.banned(history), len(row))
        left = row.index_fill(0, torch.tensor(banned, dtype=torch.long, device=row.device), REMOVED)
        return left if bool((left > REMOVED).any()) else row

    def banned(self, history: list[int]) -> dict[int, int]:
        """Tokens that would complete a repeated n-gram."""
        lengths = repeats if self.n > 1 else repeat_lengths  # every token before repeats nothing
        return {token: length for token, length in lengths(history, self.n - 1).items() if length == self.n - 1}

    def explain(self, scores, history, token) -> Iterator[Event]:
        best = int(first_largest(scores))
        if not self.n or best == token or best not in self.banned(history):
            return
        repeat = "".join(map(self.piece, [*history[len(history) - self.n + 1:], best]))
        place = len(history) - self.start
        yield Figure("spans", "forbidden repeats", {"spans": [[place, place + 1, repeat, self.n]]})
        yield Note(f"{self.piece(best)!r} would have repeated {repeat!r}; {self.piece(token)!r} was chosen instead.")
