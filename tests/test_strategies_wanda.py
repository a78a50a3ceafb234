"""Wanda against a sort written out, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch

from playground.contract import Strategy, find
from support.calibrated_layers import inputs, random_weights
from support.wrong_variants import refused

Wanda = find("wanda")


def check_wanda(cls: type[Strategy]) -> None:
    """Of every row the weights go whose magnitude times the norm of their input is smallest; the others stay."""
    weight, x = random_weights(), inputs()
    norms = [sum(value * value for value in column) ** 0.5 for column in x.T.tolist()]
    found = cls(sparsity=0.4).changed(weight, x).weight
    for row, own in zip(weight.tolist(), found.tolist()):
        order = sorted(range(len(row)), key=lambda at: abs(row[at]) * norms[at])
        gone = set(order[:int(0.4 * len(row))])
        assert own == [0 if at in gone else w for at, w in enumerate(row)]


class ComparesTheWholeMatrix(Wanda):
    def changed(self, weight, inputs):
        scaled = find("magnitude")(sparsity=self.sparsity).changed(weight * inputs.norm(dim=0), None)
        return scaled._replace(weight=weight * (scaled.weight != 0))


class ReadsNoInputs(Wanda):
    def changed(self, weight, inputs):
        return super().changed(weight, torch.ones_like(inputs))


@pytest.mark.oracle("wanda")
def test_the_weights_that_matter_least_to_their_row_become_zero():
    check_wanda(Wanda)


@pytest.mark.refuses("wanda")
@pytest.mark.parametrize("wrong", [ComparesTheWholeMatrix, ReadsNoInputs])
def test_other_weights_that_become_zero_are_noticed(wrong):
    refused(check_wanda, wrong)


def test_scaling_an_input_up_and_its_weights_down_prunes_the_same_which_magnitude_does_not():
    weight, x, scale = random_weights(), inputs(), torch.linspace(0.1, 10, 12)
    for name, same in (("wanda", True), ("magnitude", False)):
        plain, scaled = (find(name)(sparsity=0.5).changed(*given).weight != 0
                         for given in ((weight, x), (weight / scale, x * scale)))
        assert torch.equal(plain, scaled) == same


def test_equal_inputs_are_pruning_by_magnitude_and_no_sparsity_changes_nothing():
    weight, equal = random_weights(), torch.ones(3, 12)
    masks = [find(name)(pattern="2:4").changed(weight, equal).weight for name in ("wanda", "magnitude")]
    assert torch.equal(*masks)
    assert torch.equal(Wanda(sparsity=0.0).changed(weight, inputs()).weight, weight)
