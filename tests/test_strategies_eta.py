"""Eta against the library or its published formula, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import EtaLogitsWarper

from playground.contract import Sampler
from support.truncation_oracles import Eta, agrees, awkward_rows, entropies, removing
from support.wrong_variants import refused


def check_eta(cls: type[Sampler]) -> None:
    agrees(cls, "eta", EtaLogitsWarper, [0.0003, 0.02, 0.1, 0.3], awkward_rows())


def below_floor(p: Tensor, eta: float, floor: Tensor | float) -> Tensor:
    """Tokens less probable than the smaller of eta and a floor [n, 1], except the best."""
    return (p < torch.as_tensor(floor).clamp(max=eta)) & (p < p.amax(-1, keepdim=True))


class EntropyInBits(Eta):
    apply = removing(
        lambda self, scores, p: below_floor(p, self.eta, self.eta**0.5 * (-entropies(p) / math.log(2)).exp())
    )


class WithoutTheRoot(Eta):
    apply = removing(lambda self, scores, p: below_floor(p, self.eta, self.eta * (-entropies(p)).exp()))


class NeverSinks(Eta):
    apply = removing(lambda self, scores, p: below_floor(p, self.eta, self.eta))


@pytest.mark.oracle("eta")
def test_eta_is_the_librarys():
    check_eta(Eta)


@pytest.mark.refuses("eta")
@pytest.mark.parametrize("wrong", [EntropyInBits, WithoutTheRoot, NeverSinks])
def test_a_wrong_eta_is_refused(wrong):
    refused(check_eta, wrong)
