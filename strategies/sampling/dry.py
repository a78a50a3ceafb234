"""DRY: do not repeat yourself."""
from collections.abc import Iterator

import torch

from playground.algorithms.sampling.repetition import LONGEST, among, echoes, marks, stretch
from playground.contract import Sampler, knob
from playground.events import Event, Figure, Note


class DRY(Sampler):
    """Make a token that would go on repeating an earlier stretch less likely, the more the longer that stretch is
    already.

    Where the last L tokens stood before, what followed them there loses multiplier * base ** (L - allowed), once L
    reaches `allowed`. Tokens that contain a breaker end a stretch and are never punished, so that lists and dialogues
    keep their form. multiplier = 0 changes nothing. The prompt counts. The choice stays argmax unless another sampler
    draws. Released versions differ in which tokens they take for breakers. p-e-w 2024.
    """

    name, title, paper, sheet = "dry", "DRY (no repeated stretches)", "p-e-w 2024", "sampling/sampling-baselines"
    stage, rank, draws = "penalty", 5, False
    guarantee = ("collapses",)

    multiplier: float = knob(
        0.8, 0.0, 5.0, step=0.05, help="penalty of a repeat that is just too long; 0 changes nothing"
    )
    base: float = knob(1.75, 1.0, 4.0, step=0.05, help="by how much each token more of it multiplies the penalty")
    allowed: int = knob(2, 1, 10, step=1, help="repeated tokens from which the next is punished")
    window: int = knob(0, 0, 1024, step=1, help="last tokens that are searched; 0 searches all")
    breakers: str = knob(
        '\\n : " *', help="texts that end a repeated stretch, with spaces between them; \\n is a line break"
    )

    def apply(self, scores, histories):
        if not self.multiplier:
            return scores
        return torch.stack([self._punished(row, history) for row, history in zip(scores, histories)])

    def _punished(self, row: torch.Tensor, history: list[int]) -> torch.Tensor:
        tokens, penalties = among(
            {token: self.penalty(length) for token, length in self.repeats(history).items()}, len(row)
        )
        places = torch.tensor(tokens, dtype=torch.long, device=row.device)
        return row.index_add(0, places, -row.new_tensor(penalties))

    def penalty(self, length: int) -> float:
        return self.multiplier * self.base ** (length - self.allowed)

    def repeats(self, history: list[int]) -> dict[int, int]:
        """Tokens that would go on repeating a stretch of at least `allowed` tokens, and how long that is already."""
        searched = stretch(history, 0, self.window)
        found = echoes(searched, self._unbroken(searched))
        return {token: length for token, length in found.items() if length >= self.allowed and not self._breaks(token)}

    def _unbroken(self, history: list[int]) -> int:
        """Tokens since the last breaker: no repeated stretch reaches across it."""
        recent = history[-1:-LONGEST - 1:-1]
        return next((count for count, token in enumerate(recent) if self._breaks(token)), len(recent))

    def _breaks(self, token: int) -> bool:
        return any(mark in self.piece(token) for mark in marks(self.breakers))

    def explain(self, scores, history, token) -> Iterator[Event]:
        best = int(scores.argmax())
        length = self.repeats(history).get(best) if self.multiplier else None
        if length is None:
            return
        place, repeat = len(history) - self.start, "".join(map(self.piece, [*history[-length:], best]))
        yield Figure(
            "spans", "repeats that were punished", {"spans": [[place, place + 1, repeat, self.penalty(length)]]}
        )
        if token != best:
            yield Note(
                f"{self.piece(best)!r} would have gone on with {repeat!r}, which was there before: its score fell by "
                f"{self.penalty(length):.2f}, and {self.piece(token)!r} stands in its place."
            )
