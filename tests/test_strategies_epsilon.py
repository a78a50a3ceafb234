"""Epsilon against the library or its published formula, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from transformers import EpsilonLogitsWarper

from playground.contract import Sampler
from support.truncation_oracles import Epsilon, agrees, applied, awkward_rows, removing
from support.wrong_variants import refused


def check_epsilon(cls: type[Sampler]) -> None:
    agrees(cls, "epsilon", EpsilonLogitsWarper, [0.0003, 0.02, 0.1, 0.9], awkward_rows())
    assert torch.equal(applied(cls, awkward_rows(), epsilon=0.0), awkward_rows())


class RelativeFloor(Epsilon):
    apply = removing(lambda self, scores, p: p < self.epsilon * p.amax(-1, keepdim=True))


class MayRemoveTheBest(Epsilon):
    apply = removing(lambda self, scores, p: p < self.epsilon)


@pytest.mark.oracle("epsilon")
def test_epsilon_is_the_librarys():
    check_epsilon(Epsilon)


@pytest.mark.refuses("epsilon")
@pytest.mark.parametrize("wrong", [RelativeFloor, MayRemoveTheBest])
def test_a_wrong_epsilon_is_refused(wrong):
    refused(check_epsilon, wrong)
