"""Drawing without replacement: a distribution whose tokens are taken out one after another.

What is left is scaled up again before each draw. In law and in order these are the k largest of log q + Gumbel noise.
Where nothing is drawn by chance the likeliest are taken instead, and they are known from the start.
"""
from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch import Tensor


class Urn:
    def __init__(self, q: Tensor):
        """`q` [V] is a distribution; it stays as it is. `left` is the probability that was not taken out."""
        self.q, self._rest, self.taken = q, q.clone(), 0
        self.left = float(q.sum())

    @property
    def distinct(self) -> int:
        """Tokens that can still be drawn."""
        return int((self._rest > 0).sum())

    def take(self, draw: Callable[[Tensor], int]) -> int:
        """Draw a token with draw(distribution [V]) and take it out; at least one has to be left."""
        token = draw(self._rest / self.left)
        self._rest[token] = 0
        self.left = float(self._rest.sum())
        self.taken += 1
        return token


class Ranking:
    """The `most` likeliest tokens of a distribution [V], to be taken in that order. At least one."""

    def __init__(self, q: Tensor, most: int):
        top = q.topk(min(most, len(q)))
        chances = top.values.tolist()[::-1]
        self._waiting = list(zip(top.indices.tolist()[::-1], chances))
        below = max(0.0, 1 - sum(chances)) if most < len(q) else 0.0
        self._left = list(accumulate(chances, initial=below))  # from the last on, so that nothing is left of nothing

    @property
    def left(self) -> float:
        """The probability that was not taken, 0 once all that may be taken are."""
        return self._left[-1] if self._waiting else 0.0

    def take(self) -> tuple[int, float]:
        """The likeliest token that is left, and its probability; there has to be one."""
        self._left.pop()
        return self._waiting.pop()
