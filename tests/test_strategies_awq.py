"""AWQ against a search written out, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch

from playground.contract import Strategy, find
from support.calibrated_layers import inputs, output_error, random_weights
from support.wrong_variants import refused

AWQ = find("awq")


def nearest(row: list[float], bits: int) -> list[float]:
    low, high = min(*row, 0.0), max(*row, 0.0)
    step = (high - low) / (2 ** bits - 1)
    return [min((step * (code - round(-low / step)) for code in range(2 ** bits)), key=lambda entry: abs(entry - w))
            for w in row]


def scaled(weight: torch.Tensor, x: torch.Tensor, exponent: float) -> torch.Tensor:
    """Weights rounded in rows under the scales of an exponent."""
    sizes = [sum(map(abs, column)) / len(column) for column in x.T.tolist()]
    scales = [size ** exponent for size in sizes]
    middle = (max(scales) * min(scales)) ** 0.5
    rows = [[w * s / middle for w, s in zip(row, scales)] for row in weight.tolist()]
    return torch.tensor([[q / s * middle for q, s in zip(nearest(row, 3), scales)] for row in rows])


def check_awq(cls: type[Strategy]) -> None:
    """The result is the best of all scalings, by what it does to outputs."""
    weight, x = random_weights(), inputs()
    best = min((scaled(weight, x, number / 5) for number in range(5)), key=lambda new: output_error(new, weight, x))
    assert torch.allclose(cls(bits=3, group=0, exponents=5).changed(weight, x).weight, best, atol=1e-4)


class ChoosesByWeights(AWQ):
    """The exponent whose weights change least, not whose outputs do."""

    def changed(self, weight, inputs):
        return super().changed(weight, torch.eye(inputs.shape[1]) * inputs.abs().mean(0))


class ScalesTheWrongWay(AWQ):
    def _rounded(self, weight, size):
        return super()._rounded(weight, 1 / size)


@pytest.mark.oracle("awq")
def test_the_scaling_with_the_least_output_error_is_taken():
    check_awq(AWQ)


@pytest.mark.refuses("awq")
@pytest.mark.parametrize("wrong", [ScalesTheWrongWay, ChoosesByWeights])
def test_wrong_scalings_are_noticed(wrong):
    refused(check_awq, wrong)


def test_one_exponent_is_round_to_nearest_and_sixteen_bits_change_nothing():
    weight, x = random_weights(), inputs()
    plain = find("rtn")(bits=3, group=4).changed(weight, None).weight
    assert torch.allclose(AWQ(bits=3, group=4, exponents=1).changed(weight, x).weight, plain, atol=1e-6)
    assert torch.equal(AWQ(bits=16).changed(weight, x).weight, weight)


def test_outputs_stay_at_least_as_close_as_by_rounding_to_nearest():
    weight, x = random_weights(), inputs()
    own, plain = (output_error(find(name)(bits=3, group=4).changed(weight, x).weight, weight, x)
                  for name in ("awq", "rtn"))
    assert own <= plain
