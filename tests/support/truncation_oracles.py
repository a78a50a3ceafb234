"""Rows of scores, and the check of a truncation on them."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from playground.contract import Sampler, find

Epsilon, Eta, MinP, TopH, TopK, TopNSigma, TopP, Typical = (
    find(name) for name in ("epsilon", "eta", "min_p", "top_h", "top_k", "top_n_sigma", "top_p", "typical")
)
REMOVED = -math.inf
V = 30


def drawn(seed: int, count: int = 20) -> Tensor:
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def distinct_rows() -> Tensor:
    """Random rows, and rows in which a grammar has already removed most tokens; no two scores of a row are equal."""
    return torch.cat([drawn(0), drawn(1).masked_fill(drawn(2) > 0, REMOVED)])


def awkward_rows() -> Tensor:
    """The same with rows of many ties, and one that is flat."""
    return torch.cat([distinct_rows(), drawn(3).round(), torch.zeros(1, V, dtype=torch.float64)])


def applied(cls: type[Sampler], rows: Tensor, **knobs) -> Tensor:
    return cls(**knobs).apply(rows, [[]] * len(rows))


def agrees(cls: type[Sampler], knob: str, theirs: Callable, values: list, rows: Tensor) -> None:
    """The strategy's rows are those of a library processor, removed tokens included."""
    for value in values:
        assert torch.equal(applied(cls, rows, **{knob: value}), theirs(value)(None, rows)), value


def removing(gone: Callable[[Sampler, Tensor, Tensor], Tensor]) -> Callable:
    """An `apply` that removes the tokens where gone(sampler, scores [n, V], probabilities [n, V]) is true."""
    return lambda self, scores, histories: scores.masked_fill(gone(self, scores, scores.softmax(-1)), REMOVED)


def below_the_crossing(self: Sampler, scores: Tensor, p: Tensor) -> Tensor:
    ordered, order = p.sort(descending=True)
    out = ordered.cumsum(-1) > self.p
    out[..., 0] = False
    return out.scatter(-1, order, out) & (self.p < 1)


def entropies(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1, keepdim=True)
