"""Typical against the library or its published formula, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import TypicalLogitsWarper

from playground.contract import Sampler
from support.truncation_oracles import REMOVED, TopP, Typical, V, agrees, applied, awkward_rows, entropies, removing
from support.wrong_variants import refused


def check_typical(cls: type[Sampler]) -> None:
    agrees(cls, "mass", TypicalLogitsWarper, [0.05, 0.2, 0.9, 0.95], awkward_rows())
    assert torch.equal(applied(cls, awkward_rows(), mass=1.0), awkward_rows())


class MostProbableFirst(Typical):
    apply = removing(lambda self, scores, p: TopP(self.mass).apply(scores, []) == REMOVED)


class TypicalInBits(Typical):
    apply = removing(lambda self, scores, p: far_from(p, -p.log(), entropies(p) / math.log(2), self.mass))


class AlwaysTheBest(Typical):
    """Never removes the most probable token."""

    def apply(self, scores, histories):
        best = scores.argmax(-1, keepdim=True)
        return super().apply(scores, histories).scatter(-1, best, scores.gather(-1, best))


def far_from(p: Tensor, surprise: Tensor, expected: Tensor, mass: float) -> Tensor:
    """Tokens whose surprise is farther from the expected one than the nearest that hold this mass."""
    gap = (surprise - expected).abs()
    nearest, order = gap.sort(-1)
    last = (p.gather(-1, order).cumsum(-1) < mass).sum(-1, keepdim=True).clamp(max=V - 1)
    return (gap > nearest.gather(-1, last)) & (mass < 1)


@pytest.mark.oracle("typical")
def test_typical_is_the_librarys():
    check_typical(Typical)


@pytest.mark.refuses("typical")
@pytest.mark.parametrize("wrong", [MostProbableFirst, TypicalInBits, AlwaysTheBest])
def test_a_wrong_typical_is_refused(wrong):
    refused(check_typical, wrong)
