"""Min-p against the library or its published formula, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper

from playground.contract import Sampler
from support.truncation_oracles import REMOVED, MinP, agrees, applied, awkward_rows, removing
from support.wrong_variants import refused


def check_min_p(cls: type[Sampler]) -> None:
    agrees(cls, "m", MinPLogitsWarper, [0.001, 0.05, 0.5], awkward_rows())
    edge = torch.tensor(
        [[4.0, 2.0, 1.0, 1.0]], dtype=torch.float64
    ).log()  # probabilities are exact halves of each other
    assert (applied(cls, edge, m=0.5) > REMOVED).tolist() == [[True, True, False, False]], "a token on the bar stays"
    assert torch.equal(applied(cls, awkward_rows(), m=0.0), awkward_rows())


class StrictBar(MinP):
    apply = removing(lambda self, scores, p: p <= self.m * p.amax(-1, keepdim=True))


class AbsoluteBar(MinP):
    apply = removing(lambda self, scores, p: (p < self.m) & (p < p.amax(-1, keepdim=True)))


class BarOnScores(MinP):
    apply = removing(lambda self, scores, p: scores < self.m * scores.amax(-1, keepdim=True))


@pytest.mark.oracle("min_p")
def test_min_p_is_the_librarys():
    check_min_p(MinP)


@pytest.mark.refuses("min_p")
@pytest.mark.parametrize("wrong", [StrictBar, AbsoluteBar, BarOnScores])
def test_a_wrong_min_p_is_refused(wrong):
    refused(check_min_p, wrong)
