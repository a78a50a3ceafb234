"""Drawing without replacement: a distribution whose tokens are taken out one after another.

What is left is scaled up again before each draw. In law and in order these are the k largest of log q + Gumbel noise.
"""
from __future__ import annotations

from collections.abc import Callable

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
