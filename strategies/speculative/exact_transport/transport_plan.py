"""How often each token is accepted by the best rule for k independent draft tokens.

A rule that accepts one of k tokens drawn from q, token x with probability a(x), exists if and only if every set B of
tokens has a(B) <= 1 - (1 - q(B))^k: it can be accepted only if it is drafted (maximum flow and minimum cut). The output
follows p if a <= p. The largest acceptance rate is the minimum over all sets B of p(B) + 1 - q(B)^k, which a set of
tokens with the lowest p / q attains: between two such sets the minimum is concave in q(B).
"""
from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class TransportPlan:
    """The solution for a target distribution p [V], a draft distribution q [V] and k draft tokens."""

    def __init__(self, p: Tensor, q: Tensor, k: int):
        p, q = p.cpu().double(), q.cpu().double()
        self.p, self.q, self.k = p / p.sum(), q / q.sum(), k

    @property
    def rate(self) -> float:
        """The largest acceptance rate."""
        return min(1.0, max(0.0, 1 + float(self._gains.min())))

    @cached_property
    def accepted(self) -> Tensor:
        """The probability that each token is drafted and accepted, [V]: min(p, c q), with the sum `rate`.

        Of all solutions with this sum it is the one with the most even ratios to q, and so one that some rule attains.
        """
        return torch.minimum(self.p, self._ceiling * self.q)

    @cached_property
    def limit(self) -> float:
        """The label from which on no draft token is accepted: the smallest of k labels is below it with `rate`."""
        return 1 - (1 - self.rate) ** (1 / self.k)

    def below(self, label: Tensor | float) -> Tensor | float:
        """The probability that the smallest of k labels is below a label and below the limit."""
        least = label.clamp(max=self.limit) if isinstance(label, Tensor) else min(label, self.limit)
        return 1 - (1 - least) ** self.k

    def residual(self) -> Tensor:
        """The distribution [V] of the next token if no draft token is accepted."""
        rest = (self.p - self.accepted).clamp(min=0)
        total = rest.sum()
        return rest / total if total > 0 else self.p

    @cached_property
    def order(self) -> Tensor:
        """The tokens that can be drafted, by ascending p / q."""
        possible = self.q.nonzero()[:, 0]
        return possible[(self.p[possible] / self.q[possible]).argsort()]

    @property
    def cut(self) -> int:
        """The place in this order up to which tokens attain the minimum."""
        return int(self._gains.argmin())

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor]:
        """Cumulative probabilities in this order."""
        return self.p[self.order].cumsum(0), self.q[self.order].cumsum(0)

    @cached_property
    def _gains(self) -> Tensor:
        """p(B) - q(B)^k for the first tokens of this order."""
        low_p, low_q = self._sums
        return low_p - low_q**self.k

    @cached_property
    def _ceiling(self) -> float:
        """c: the ratio to q that no acceptance exceeds. The sum of min(p, c q) is piecewise linear in c."""
        (low_p, low_q), last = self._sums, len(self.order) - 1
        ratios = self.p[self.order] / self.q[self.order]
        reached = low_p + ratios * (1 - low_q)  # the sum at c = each ratio
        place = int(torch.searchsorted(reached, self.rate))
        if place > last:
            return float(ratios[last])
        before_p, before_q = (float(low_p[place - 1]), float(low_q[place - 1])) if place else (0.0, 0.0)
        return (self.rate - before_p) / (1 - before_q)
