"""Sampling tokens without replacement.

The remaining distribution is renormalised before each draw. Tokens and order are distributed as the k largest values
of log q + Gumbel noise (Gumbel-Top-k). Under greedy decoding the most probable tokens are taken in order instead.
"""
from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from playground.decoding.rng import cumulate
from playground.engine.host_copies import read_lists
from playground.engine.sampling import largest

SMALL = 1e-3  # share of the mass below which what remains is summed again, since a difference would be rounding


class RemainingTokens:
    """A distribution whose tokens are sampled without replacement.

    The vocabulary is summed once: a draw inverts this cumulative sum and steps over the tokens removed before. This is
    done on the host, since each draw asks for several numbers.
    """

    def __init__(self, q: Tensor, on_host: Tensor | None = None):
        """`q` [V] is a distribution and is not modified; `on_host` is its copy if it was copied with others."""
        self.q, self._whole, self._gone = q, q.cpu() if on_host is None else on_host, 0.0
        self._removed: list[tuple[float, float, int]] = []  # (sum before the token, probability, token), ascending

    @property
    def taken(self) -> int:
        """Number of tokens removed."""
        return len(self._removed)

    @property
    def distinct(self) -> int:
        """Number of remaining tokens."""
        return self._possible - self.taken

    @cached_property
    def _possible(self) -> int:
        return int((self._whole > 0).sum())

    @cached_property
    def left(self) -> float:
        """Probability mass of the remaining tokens."""
        total = float(self._cumulated[-1])
        left = total - self._gone
        return left if left > SMALL * total else float(self.rest.sum())

    @cached_property
    def rest(self) -> Tensor:
        """The probabilities [V], not renormalised, without those of removed tokens. Do not modify it."""
        rest = self._whole.clone()
        rest[[token for _, _, token in self._removed]] = 0
        return rest

    def share(self, token: int) -> float:
        """The probability of a token in the whole distribution."""
        return float(self._whole[token])

    def take(self, draw: Callable[[Tensor], int]) -> int:
        """Sample a token with draw(distribution [V]) and remove it. At least one token must remain."""
        return self._remove(draw(self.rest / self.left))

    def take_at(self, u: float) -> int:
        """Sample with a uniform number in [0, 1) and remove the token: the one that `take` finds by inverting the
        cumulative sum, without a pass over the vocabulary.
        """
        target = u * self.left
        for before, mass, _ in self._removed:
            if target < before:
                break
            target += mass
        token = int(torch.searchsorted(self._cumulated, target, right=True))
        gone = {removed for _, _, removed in self._removed}
        if token in gone or token == len(self._whole):  # by rounding
            token = int(self.rest.nonzero()[-1])
        return self._remove(token)

    def _remove(self, token: int) -> int:
        before = float(self._cumulated[token - 1]) if token else 0.0
        mass = float(self._cumulated[token]) - before
        insort(self._removed, (before, mass, token))
        self._gone += mass
        self.__dict__.pop("left", None)
        if "rest" in self.__dict__:
            self.rest[token] = 0
        return token

    @cached_property
    def _cumulated(self) -> Tensor:
        return cumulate(self._whole)


class Ranking:
    """The `most` most probable tokens of a distribution [V], at least one, taken in that order."""

    def __init__(self, q: Tensor, most: int):
        top = largest(q, min(most, len(q)))
        chances, tokens = (part[::-1] for part in read_lists(*top))
        self._waiting = list(zip(tokens, chances))
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
