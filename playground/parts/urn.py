"""Drawing without replacement: a distribution whose tokens are taken out one after another.

What is left is scaled up again before each draw. In law and in order these are the k largest of log q + Gumbel noise.
"""
from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Urn:
    def __init__(self, q: Tensor):
        """`q` [V] is a distribution; it stays as it is."""
        self._rest, self.taken = q.clone(), 0

    @property
    def left(self) -> float:
        """Probability that was not taken out."""
        return float(self._rest.sum())

    @property
    def distinct(self) -> int:
        """Tokens that can still be drawn."""
        return int((self._rest > 0).sum())

    def take(self, draw: Callable[[Tensor], int]) -> int:
        """Draw a token with draw(distribution [V]) and take it out; at least one has to be left."""
        token = draw(self._rest / self._rest.sum())
        self._rest[token] = 0
        self.taken += 1
        return token
