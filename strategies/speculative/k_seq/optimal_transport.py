"""Choosing among k independent draft tokens so that the result follows p: k-SEQ, Sun et al. 2023, arXiv 2310.15141.

Which of k tokens drawn from q to accept is an optimal transport problem. The exact solution is a linear program of size
V^k; k-SEQ tests the tokens one by one against p / rho, and its acceptance rate is at least (1 - 1/e) of the optimum.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from playground.algorithms.speculative.verification import Ruling
from playground.contract.token_tree import TokenTree
from playground.events import Test

HALVINGS = 30
ROUNDING = 1e-13


def accepted_once(p: Tensor, q: Tensor, rho: float) -> float:
    """beta: the probability that one draft token from q is accepted with min(1, p / (rho q))."""
    return min(1.0, float(torch.minimum(p / rho, q).sum()))


def accepted_at_all(beta: float, k: int) -> float:
    """The probability that one of k draft tokens is accepted."""
    return 1 - (1 - beta) ** k


def division(p: Tensor, q: Tensor, k: int) -> float:
    """The smallest rho in [1, k] at which no token is accepted more often than p allows, rounded up.

    With a smaller rho the output would not follow p; a larger one is exact but accepts less often. p, q: [V].
    """
    low, high = 1.0, float(k)
    if k == 1 or _fits(p, q, k, low):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(p, q, k, middle) else (middle, high)
    return high


def _fits(p: Tensor, q: Tensor, k: int, rho: float) -> bool:
    beta = accepted_once(p, q, rho)
    return accepted_at_all(beta, k) <= rho * beta + ROUNDING


def residual(p: Tensor, q: Tensor, k: int, rho: float) -> Tensor:
    """The residual distribution after all k draft tokens are rejected, [V]: p minus the mass of accepted ones."""
    beta = accepted_once(p, q, rho)
    if beta == 0:
        return p
    rest = (p - torch.minimum(p / rho, q) * (accepted_at_all(beta, k) / beta)).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else p


def k_seq(p: Tensor, children: list[int], tree: TokenTree, flip: Callable[[float], tuple[bool, float]],
          draw: Callable[[Tensor], int]) -> Ruling:
    """Accept the first of several children drawn independently from q that passes its test.

    If all are rejected, a token is sampled from the residual; if it equals a child, that child is accepted.
    """
    q, k, tests = tree.q[children[0]].to(p.dtype), len(children), []
    rho = division(p, q, k)
    for child in children:
        token = tree.tokens[child]
        chance = min(1.0, float(p[token] / (rho * q[token])))
        accepted, u = flip(chance)
        tests.append(Test(child, float(p[token]), float(q[token]), u, accepted, chance=chance))
        if accepted:
            return Ruling(child, tests=tests)
    rest = residual(p, q, k, rho)
    token = draw(rest)
    return Ruling(next((child for child in children if tree.tokens[child] == token), None), token, tests, rest)
