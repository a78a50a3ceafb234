"""Pruning by magnitude against a sorted list and a trial of all groups, and wrong variants against the same check."""
from __future__ import annotations

from itertools import combinations

import pytest
import torch

from playground.contract import Strategy, find
from support.calibrated_layers import random_weights
from support.wrong_variants import refused

Magnitude = find("magnitude")


def check_pruning(cls: type[Strategy]) -> None:
    """The smallest weights of the matrix become zero, and the others stay to the bit."""
    weight = random_weights()
    found = cls(sparsity=0.3).changed(weight, None).weight
    smallest = set(sorted(weight.abs().flatten().tolist())[:int(0.3 * weight.numel())])
    for before, after in zip(weight.flatten().tolist(), found.flatten().tolist()):
        assert after == (0 if abs(before) in smallest else before)


def check_pattern(cls: type[Strategy]) -> None:
    """Of each group the places are kept whose weights are largest together; columns that are left over stay."""
    weight = random_weights(inputs=14)
    found = cls(pattern="2:4").changed(weight, None).weight
    for row, own in zip(weight.tolist(), found.tolist()):
        for start in range(0, 12, 4):
            group = row[start:start + 4]
            best = max(combinations(range(4), 2), key=lambda places: sum(abs(group[at]) for at in places))
            assert own[start:start + 4] == [w if at in best else 0 for at, w in enumerate(group)]
        assert own[12:] == row[12:]


class PrunesRows(Magnitude):
    def changed(self, weight, inputs):
        return find("wanda")(**self.values()).changed(weight, torch.eye(weight.shape[1]))


class PrunesTheLargest(Magnitude):
    def changed(self, weight, inputs):
        kept = super().changed(1 / weight, inputs)
        return kept._replace(weight=weight * (kept.weight != 0))


@pytest.mark.oracle("magnitude")
def test_the_smallest_weights_become_zero():
    check_pruning(Magnitude)
    check_pattern(Magnitude)


@pytest.mark.refuses("magnitude")
@pytest.mark.parametrize("wrong", [PrunesRows, PrunesTheLargest])
def test_other_weights_that_become_zero_are_noticed(wrong):
    refused(check_pruning, wrong)


def test_no_sparsity_changes_nothing_and_full_sparsity_leaves_zeros():
    weight = random_weights()
    assert torch.equal(Magnitude(sparsity=0.0).changed(weight, None).weight, weight)
    assert not Magnitude(sparsity=1.0).changed(weight, None).weight.any()


@pytest.mark.parametrize(("knobs", "bits"), [
    ({"sparsity": 0.5}, 8 + 1), ({"sparsity": 0.0}, 16), ({"pattern": "2:4"}, 8 + 1), ({"pattern": "1:2"}, 8 + 0.5),
])
def test_what_is_kept_takes_sixteen_bits_and_its_place(knobs, bits):
    assert Magnitude(**knobs).changed(random_weights(), None).bits == pytest.approx(bits)


def test_of_equal_weights_the_first_stay():
    assert Magnitude(pattern="2:4").changed(torch.ones(1, 4), None).weight.tolist() == [[1, 1, 0, 0]]
