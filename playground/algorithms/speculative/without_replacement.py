"""Sampling tokens without replacement.

The remaining distribution is renormalised before each draw. Tokens and order are distributed as the k largest values
of log q + Gumbel noise (Gumbel-Top-k). Under greedy decoding the most probable tokens are taken in order instead.
"""
from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch import Tensor


class RemainingTokens:
    """A distribution whose tokens are sampled without replacement."""

    def __init__(self, q: Tensor):
        """`q` [V] is a distribution and is not modified. `left` is the probability mass of the remaining tokens."""
        self.q, self._rest, self.taken = q, q.clone(), 0
        self.left = float(q.sum())

    @property
    def distinct(self) -> int:
        """Number of remaining tokens."""
        return int((self._rest > 0).sum())

    def take(self, draw: Callable[[Tensor], int]) -> int:
        """Sample a token with draw(distribution [V]) and remove it. At least one token must remain."""
        token = draw(self._rest / self.left)
        self._rest[token] = 0
        self.left = float(self._rest.sum())
        self.taken += 1
        return token


class Ranking:
    """The `most` most probable tokens of a distribution [V], at least one, taken in that order."""

    def __init__(self, q: Tensor, most: int):
        top = q.topk(min(most, len(q)))
        chances = top.values.tolist()[::-1]
        self._waiting = list(zip(top.indices.tolist()[::-1], chances))
        below = max(0.0, 1 - sum(chances)) if most < len(q) else 0.0
        self._left = list(accumulate(chances, initial=below))  # summed from the last token on, so it never goes below 0

    @property
    def left(self) -> float:
        """Probability mass of the remaining tokens of the vocabulary; 0 once `most` tokens are taken."""
        return self._left[-1] if self._waiting else 0.0

    def take(self) -> tuple[int, float]:
        """Remove the most probable remaining token and return it with its probability. One must remain."""
        self._left.pop()
        return self._waiting.pop()
