"""An allowed token by rejection sampling: tokens are sampled from p and checked one by one, until one is accepted.

The token follows p given that it is allowed. A few more trials estimate Z, the sum of p over allowed tokens: every
method here gives a token and a weight W with E[W 1(v was taken)] = p(v) for each allowed v, so that E[W] = Z. The
estimate depends on the number of trials; 1 over that number would be biased. Lipkin et al. 2025, arXiv 2504.05410.

Where the model finds nearly nothing that is allowed, thousands of tokens would be sampled. After `PATIENCE` rejections
the whole vocabulary is checked instead, and what further trials would have found follows from that: the same token
law, and a weight with the same expectation. A mask would not do, since it may allow one tokenisation only.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import floor, log, log1p
from operator import not_

import torch
from torch import Tensor

from playground.algorithms.speculative.without_replacement import RemainingTokens

NOTHING = 1e-12  # probability that counts as zero: less than this after many rejections is rounding
PATIENCE = 256  # distinct rejected tokens at a position after which all are checked
Draw = Callable[[Tensor], int]


@dataclass
class Tries:
    """One position of a text: p [V] in double precision, the checker, and its answers so far."""

    p: Tensor
    legal: Callable[[int], bool]
    draw: Draw  # of a distribution [V]
    asked: dict[int, bool] = field(default_factory=dict)  # tokens shown to the checker, in order

    def passes(self, token: int) -> bool:
        """The checker's answer, computed once per token."""
        if token not in self.asked:
            self.asked[token] = self.legal(token)
        return self.asked[token]

    @property
    def many(self) -> bool:
        """Whether to check the whole vocabulary is less work than further trials."""
        return len(self.asked) >= PATIENCE and sum(map(not_, self.asked.values())) >= PATIENCE

    def allowed(self) -> Tensor:
        """p of the allowed tokens and 0 for the others, [V]. Every possible token is checked."""
        passed = [token for token in self.p.nonzero()[:, 0].tolist() if self.passes(token)]
        return torch.zeros_like(self.p).index_copy(0, torch.tensor(passed).long(), self.p[passed])

    def exact(self) -> tuple[int | None, float]:
        """An allowed token sampled from p, and the allowed mass; None and 0 if there is none."""
        allowed = self.allowed()
        mass = float(allowed.sum())
        return (self.draw(allowed / mass), mass) if mass > NOTHING else (None, 0.0)


def first_legal(tries: Tries) -> tuple[int | None, float]:
    """The first accepted token without an estimate: weight 1, or None and 0 if nothing is allowed."""
    remaining = RemainingTokens(tries.p)
    while remaining.distinct and remaining.left > NOTHING:
        if tries.many:
            token, mass = tries.exact()
            return token, float(mass > 0)
        token = remaining.take(tries.draw)
        if tries.passes(token):
            return token, 1.0
    return None, 0.0


def recursive(tries: Tries) -> tuple[int | None, float]:
    """One trial beyond the first accepted token. If v is sampled with probability q, Z = q ok(v) + (1 - q) E[ok of the
    next].
    """
    remaining, weight = RemainingTokens(tries.p), 1.0
    while remaining.distinct and remaining.left > NOTHING:
        if tries.many:
            token, mass = tries.exact()
            return token, weight * mass / remaining.left
        left, token = remaining.left, remaining.take(tries.draw)
        q = float(tries.p[token]) / left
        if tries.passes(token):
            return token, weight * _seconded(remaining, tries, q)
        weight *= 1 - q
    return None, 0.0


def _seconded(remaining: RemainingTokens, tries: Tries, q: float) -> float:
    """Estimate of the allowed share of the remaining mass before an accepted token, by one more trial."""
    if not remaining.distinct or remaining.left <= NOTHING:
        return 1.0
    return 1.0 if tries.passes(remaining.take(tries.draw)) else q


def counting(tries: Tries, uniform: Callable[[], float], accepts: int, most: int) -> tuple[int | None, float]:
    """Sample with replacement until `accepts` were accepted, or `most` rejected: W = (accepted - 1) / (sampled - 1),
    one less being counted only if the last one was accepted. Repeated samples of rejected tokens are not drawn but
    counted, by a geometric number.
    """
    rest, refused, taken, passed, whole = tries.p.clone(), 0, None, 0, float(tries.p.sum())
    while passed < accepts and (left := float(rest.sum())) > NOTHING:
        if tries.many:
            rest = tries.allowed()  # refused ones are counted by `_again` from here on
            left = float(rest.sum())
            if left <= NOTHING:
                break
        refused += _again(1 - left / whole, uniform)
        if refused >= most:
            break
        token = tries.draw(rest / left)
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
    """Number of repeated samples of rejected tokens, which have this share of the mass, before another token."""
    if share <= NOTHING:
        return 0
    return floor(log1p(-uniform()) / log(share))
