"""Round to nearest against a search of the whole grid, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch

from playground.contract import Strategy, find, make
from playground.errors import Refusal
from support.wrong_variants import refused

RoundToNearest = find("rtn")


def weights(inputs: int = 20) -> torch.Tensor:
    found = torch.randn(3, inputs, generator=torch.Generator().manual_seed(0))
    found[1, :8] = found[1, :8].abs() + 1  # a group on one side of zero
    found[2, :8] = 0
    return found


def nearest(weight: float, grid: list[float]) -> float:
    return min(grid, key=lambda value: abs(value - weight))


def grid_of(group: list[float], bits: int, symmetric: bool) -> list[float]:
    """All values of the grid of a group, by the formulas of the sheet."""
    if symmetric:
        most = 2 ** (bits - 1) - 1
        return [max(map(abs, group)) / most * code for code in range(-most, most + 1)]
    low, high = min(*group, 0.0), max(*group, 0.0)
    step = (high - low) / (2 ** bits - 1)
    zero = round(-low / step) if step else 0
    return [step * (code - zero) for code in range(2 ** bits)]


def check_rounding(cls: type[Strategy]) -> None:
    """Every weight is the nearest of all values that its group's grid has; the last group may be shorter."""
    for bits, symmetric in ((2, False), (3, True), (4, False)):
        rows = weights()
        found = cls(bits=bits, group=8, symmetric=symmetric).changed(rows, None).weight
        for row, own in zip(rows.tolist(), found.tolist()):
            for start in range(0, len(row), 8):
                grid = grid_of(row[start:start + 8], bits, symmetric)
                assert own[start:start + 8] == pytest.approx([nearest(w, grid) for w in row[start:start + 8]], abs=1e-5)


class OneGroupPerRow(RoundToNearest):
    def changed(self, weight, inputs):
        return make("rtn", **self.values() | {"group": 0}).changed(weight, inputs)


class CutsOff(RoundToNearest):
    def changed(self, weight, inputs):
        return super().changed(weight - 0.01, inputs)


@pytest.mark.oracle("rtn")
def test_weights_are_rounded_to_the_nearest_value_of_their_grid():
    check_rounding(RoundToNearest)


@pytest.mark.refuses("rtn")
@pytest.mark.parametrize("wrong", [OneGroupPerRow, CutsOff])
def test_wrong_roundings_are_noticed(wrong):
    refused(check_rounding, wrong)


def test_no_weight_moves_by_more_than_half_a_step_and_rounding_again_changes_nothing():
    method, rows = RoundToNearest(bits=3, group=0, symmetric=True), weights()
    found = method.changed(rows, None).weight
    step = rows.abs().amax(-1, keepdim=True) / 3
    assert bool(((found - rows).abs() <= step / 2 + 1e-6).all())
    assert torch.allclose(method.changed(found, None).weight, found, atol=1e-6)


def test_one_bit_is_the_sign_times_the_mean_magnitude():
    rows = weights(8)
    expected = rows.abs().mean(-1, keepdim=True) * torch.where(rows < 0, -1.0, 1.0)
    assert torch.equal(RoundToNearest(bits=1, group=0).changed(rows, None).weight, expected)


def test_sixteen_bits_change_nothing():
    rows = weights()
    assert torch.equal(RoundToNearest(bits=16, group=64).changed(rows, None).weight, rows)


@pytest.mark.parametrize(("knobs", "bits"), [
    ({"bits": 4, "group": 10, "symmetric": True}, 4 + 16 / 10), ({"bits": 4, "group": 0}, 4 + 20 / 20),
    ({"bits": 3, "group": 16}, 3 + 2 * 19 / 20), ({"bits": 16}, 16),
])
def test_scales_and_zero_points_count_as_bits(knobs, bits):
    assert RoundToNearest(**{"group": 0} | knobs).changed(weights(), None).bits == pytest.approx(bits)


def test_a_layer_that_is_too_small_for_a_group_is_refused():
    with pytest.raises(Refusal, match="20 inputs, too few for groups of 64: choose a smaller group"):
        RoundToNearest(bits=4, group=64).changed(weights(), None)
