"""GPTQ against inverses computed anew for every column, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch

from playground.contract import Strategy, find
from playground.errors import Refusal
from support.calibrated_layers import inputs, output_error, random_weights
from support.wrong_variants import refused

GPTQ = find("gptq")


def rounded(column: torch.Tensor, group: torch.Tensor, bits: int) -> torch.Tensor:
    """A column rounded to the asymmetric grid of its group, row by row."""
    found = []
    for value, row in zip(column.tolist(), group.tolist()):
        low, high = min(*row, 0.0), max(*row, 0.0)
        step = (high - low) / (2 ** bits - 1)
        found.append(min((step * (code - round(-low / step)) for code in range(2 ** bits)),
                         key=lambda entry: abs(entry - value)))
    return torch.tensor(found, dtype=torch.double)


def by_definition(weight: torch.Tensor, x: torch.Tensor, bits: int, group: int, damping: float) -> torch.Tensor:
    """Each column in turn: round it, then change the free ones by the inverse of their own Hessian."""
    new, hessian = weight.double().clone(), x.double().T @ x.double()
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.double)
    for at in range(new.shape[1]):
        if at % group == 0:
            scales = new[:, at:at + group].clone()
        final = rounded(new[:, at], scales, bits)
        inverse = torch.linalg.inv(hessian[at:, at:])
        lost = (new[:, at] - final) / inverse[0, 0]
        new[:, at:] -= lost[:, None] * inverse[0]
        new[:, at] = final
    return new


def check_gptq(cls: type[Strategy]) -> None:
    weight, x = random_weights(), inputs()
    found = cls(bits=3, group=4, damping=0.01).changed(weight, x).weight
    assert torch.allclose(found.double(), by_definition(weight, x, 3, 4, 0.01), atol=1e-4)


class MakesUpForNothing(GPTQ):
    def changed(self, weight, inputs):
        return find("rtn")(bits=self.bits, group=self.group).changed(weight, None)


class ReadsOtherInputs(GPTQ):
    def changed(self, weight, inputs):
        return super().changed(weight, inputs.flip(-1))


@pytest.mark.oracle("gptq")
def test_columns_are_rounded_and_made_up_for_as_defined():
    check_gptq(GPTQ)


@pytest.mark.refuses("gptq")
@pytest.mark.parametrize("wrong", [MakesUpForNothing, ReadsOtherInputs])
def test_wrong_compensations_are_noticed(wrong):
    refused(check_gptq, wrong)


def test_outputs_stay_closer_than_by_rounding_to_nearest():
    weight, x = random_weights(), inputs()
    losses = [output_error(find(name)(bits=3, group=4).changed(weight, x).weight, weight, x)
              for name in ("gptq", "rtn")]
    assert losses[0] < losses[1]


def test_sixteen_bits_change_nothing_and_an_input_that_never_occurs_is_not_read():
    weight, x = random_weights(), inputs()
    assert torch.equal(GPTQ(bits=16).changed(weight, x).weight, weight)
    x[:, 3] = 0
    found = GPTQ(bits=3, group=4).changed(weight, x).weight
    assert found.isfinite().all() and not found[:, 3].any()


def test_a_layer_that_is_too_small_for_a_group_is_refused():
    with pytest.raises(Refusal, match="too few for groups of 64"):
        GPTQ().changed(random_weights(), inputs())
