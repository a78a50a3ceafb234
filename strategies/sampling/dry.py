"""DRY: a penalty on repeated sequences."""
from collections.abc import Iterator

import torch

from playground.algorithms.sampling.repetition import LONGEST, in_vocabulary, last_tokens, parse_marks, repeats
from playground.contract import Sampler, knob
from playground.engine.sampling import first_largest
from playground.events import Event, Figure, Note


class DRY(Sampler):
    """Penalise a token that would extend a repeated sequence, exponentially in the length of the repeat.

    If the last L tokens occurred before, the token that followed them is penalised by multiplier * base ** (L -
    allowed) if L reaches `allowed`. Tokens that contain a breaker end a sequence and are never penalised, so that lists
    and dialogues keep their form. multiplier = 0 changes nothing. The prompt is included. The choice stays argmax
    unless another sampler draws. Released versions differ in which tokens are breakers. p-e-w 2024.
    """

    name, title, paper, sheet = "dry", "DRY (no repeated stretches)", "p-e-w 2024", "sampling/sampling-baselines"
    stage, rank, draws = "penalty", 5, False
    guarantee = ("collapses",)

    multiplier: float = knob(
        0.8, 0.0, 5.0, step=0.05, help="penalty of the shortest penalised repeat; 0 changes nothing"
    )
    base: float = knob(1.75, 1.0, 4.0, step=0.05, help="factor of the penalty per additional repeated token")
    allowed: int = knob(2, 1, 10, step=1, help="minimum number of repeated tokens to penalise the next one")
    window: int = knob(0, 0, 4096, step=1, help="last tokens that are searched; 0: all")
    breakers: str = knob(
        '\\n : " *', help="texts that end a repeated sequence, separated by spaces; \\n is a line break"
    )

    def apply(self, scores, histories):
        if not self.multiplier:
            return scores
        return torch.stack([self._penalised(row, history) for row, history in zip(scores, histories)])

    def _penalised(self, row: torch.Tensor, history: list[int]) -> torch.Tensor:
        tokens, penalties = in_vocabulary(
            {token: self.penalty(length) for token, length in self.repeats(history).items()}, len(row)
        )
        places = torch.tensor(tokens, dtype=torch.long, device=row.device)
        return row.index_add(0, places, -row.new_tensor(penalties))

    def penalty(self, length: int) -> float:
        return self.multiplier * self.base ** (length - self.allowed)

    def repeats(self, history: list[int]) -> dict[int, int]:
        """Tokens that would extend a repeat of at least `allowed` tokens, with its length."""
        searched = last_tokens(history, 0, self.window)
        found = repeats(searched, self._unbroken(searched))
        return {token: length for token, length in found.items() if length >= self.allowed and not self._breaks(token)}

    def _unbroken(self, history: list[int]) -> int:
        """Number of tokens since the last breaker, the longest possible repeat."""
        recent = history[-1:-LONGEST - 1:-1]
        return next((count for count, token in enumerate(recent) if self._breaks(token)), len(recent))

    def _breaks(self, token: int) -> bool:
        return any(mark in self.piece(token) for mark in parse_marks(self.breakers))

    def explain(self, scores, history, token) -> Iterator[Event]:
        best = int(first_largest(scores))
        length = self.repeats(history).get(best) if self.multiplier else None
        if length is None:
            return
        place, repeat = len(history) - self.start, "".join(map(self.piece, [*history[-length:], best]))
        yield Figure(
            "spans", "penalised repeats", {"spans": [[place, place + 1, repeat, self.penalty(length)]]}
        )
        if token != best:
            yield Note(
                f"{self.piece(best)!r} would have repeated {repeat!r}: its score was lowered by "
                f"{self.penalty(length):.2f}, and {self.piece(token)!r} was chosen instead."
            )
