"""A legal token by trying: tokens are drawn from p and shown to a checker one by one, until one passes.

The token follows p given that it is legal. A few more tries estimate the legal mass Z, the sum of p over legal tokens:
every way here gives a token and a weight W with E[W where v was taken] = p(v) for each legal v, so that E[W] = Z. The
estimate depends on the number of tries; 1 over that number would be biased. Lipkin et al. 2025, arXiv 2504.05410.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import floor, log, log1p

from torch import Tensor

from playground.algorithms.speculative.without_replacement import RemainingTokens

NOTHING = 1e-12  # probability that counts as none: what is left after so many refusals is rounding
Draw = Callable[[Tensor], int]


@dataclass
class Tries:
    """One place in a text: p [V] in double precision, what may follow, and what was asked so far."""

    p: Tensor
    legal: Callable[[int], bool]
    draw: Draw  # of a distribution [V]
    asked: dict[int, bool] = field(default_factory=dict)  # tokens shown to the checker, in order

    def passes(self, token: int) -> bool:
        """What the checker says; it is asked once about each token."""
        if token not in self.asked:
            self.asked[token] = self.legal(token)
        return self.asked[token]


def first_legal(tries: Tries) -> tuple[int | None, float]:
    """The first that passes, and no estimate: weight 1, or None and 0 where nothing is legal."""
    remaining = RemainingTokens(tries.p)
    while remaining.distinct and remaining.left > NOTHING:
        token = remaining.take(tries.draw)
        if tries.passes(token):
            return token, 1.0
    return None, 0.0


def recursive(tries: Tries) -> tuple[int | None, float]:
    """One try beyond the first that passes. Where v comes up with probability q, Z = q ok(v) + (1 - q) E[ok of the
    next].
    """
    remaining, weight = RemainingTokens(tries.p), 1.0
    while remaining.distinct and remaining.left > NOTHING:
        left, token = remaining.left, remaining.take(tries.draw)
        q = float(tries.p[token]) / left
        if tries.passes(token):
            return token, weight * _seconded(remaining, tries, q)
        weight *= 1 - q
    return None, 0.0


def _seconded(remaining: RemainingTokens, tries: Tries, q: float) -> float:
    """What is known of the legal share of all that was left before a token that passed, by one try more."""
    if not remaining.distinct or remaining.left <= NOTHING:
        return 1.0
    return 1.0 if tries.passes(remaining.take(tries.draw)) else q


def counting(tries: Tries, uniform: Callable[[], float], accepts: int, most: int) -> tuple[int | None, float]:
    """Draw with replacement until `accepts` passed, or `most` were refused: W = (passed - 1) / (drawn - 1), one less
    being counted only where the last one passed. Draws of tokens that were refused before are not made but counted, by
    a geometric number."""
    rest, refused, taken, passed = tries.p.clone(), 0, None, 0
    while passed < accepts and float(rest.sum()) > NOTHING:
        refused += _again(1 - float(rest.sum()) / float(tries.p.sum()), uniform)
        if refused >= most:
            break
        token = tries.draw(rest / rest.sum())
        if tries.passes(token):
            passed, taken = passed + 1, token if taken is None else taken
        else:
            refused, rest[token] = refused + 1, 0.0
        if refused >= most:
            break
    if taken is None:
        return None, 0.0
    return taken, min(accepts - 1, passed) / (passed + min(refused, most) - 1)


def _again(share: float, uniform: Callable[[], float]) -> int:
    """How often tokens that were refused before come up before another one does; they have that share of the mass."""
    if share <= NOTHING:
        return 0
    return floor(log1p(-uniform()) / log(share))
