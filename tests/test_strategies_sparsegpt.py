"""SparseGPT against inverses computed anew for every column, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch

from playground.contract import Strategy, find
from support.calibrated_layers import inputs, output_error, random_weights
from support.wrong_variants import refused

SparseGPT = find("sparsegpt")


def by_definition(weight: torch.Tensor, x: torch.Tensor, sparsity: float, block: int) -> torch.Tensor:
    """Each column in turn: prune it where its block says, then change the free ones by the inverse of their Hessian."""
    new, hessian = weight.double().clone(), x.double().T @ x.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.double)
    for at in range(new.shape[1]):
        inverse = torch.linalg.inv(hessian[at:, at:])
        if at % block == 0:
            gone = cheapest(new[:, at:at + block], hessian[at:, at:], sparsity)
        final = new[:, at].masked_fill(gone[:, at % block], 0)
        new[:, at:] -= ((new[:, at] - final) / inverse[0, 0])[:, None] * inverse[0]
        new[:, at] = final
    return new


def cheapest(weights: torch.Tensor, hessian: torch.Tensor, sparsity: float) -> torch.Tensor:
    """The weights of a block whose removal costs least, each when its column is the first that is free."""
    costs = [weights[:, at].square() / torch.linalg.inv(hessian[at:, at:])[0, 0] for at in range(weights.shape[1])]
    ranks = torch.stack(costs, 1).flatten().argsort().argsort().view_as(weights)
    return ranks < int(sparsity * weights.numel())


def check_sparsegpt(cls: type[Strategy]) -> None:
    weight, x = random_weights(), inputs()
    found = cls(sparsity=0.5, block=8, damping=0.01).changed(weight, x).weight
    assert torch.allclose(found.double(), by_definition(weight, x, 0.5, 8), atol=1e-4)


class MakesUpForNothing(SparseGPT):
    def changed(self, weight, inputs):
        new = super().changed(weight, inputs)
        return new._replace(weight=weight * (new.weight != 0))


class PrunesBySize(SparseGPT):
    def _mask(self, costs):
        return super()._mask(torch.arange(costs.numel()).view_as(costs).float())


@pytest.mark.oracle("sparsegpt")
def test_columns_are_pruned_and_made_up_for_as_defined():
    check_sparsegpt(SparseGPT)


@pytest.mark.refuses("sparsegpt")
@pytest.mark.parametrize("wrong", [MakesUpForNothing, PrunesBySize])
def test_wrong_prunings_are_noticed(wrong):
    refused(check_sparsegpt, wrong)


def test_outputs_stay_closer_than_by_wanda_in_the_same_pattern():
    weight, x = random_weights(inputs=12), inputs()
    own, other = (find(name)(pattern="2:4").changed(weight, x).weight for name in ("sparsegpt", "wanda"))
    assert all(int((row != 0).sum()) == 2 for row in own.unflatten(1, (-1, 4)).flatten(0, 1))
    assert output_error(own, weight, x) < output_error(other, weight, x)


def test_no_sparsity_changes_nothing():
    weight = random_weights()
    assert torch.equal(SparseGPT(sparsity=0.0).changed(weight, inputs()).weight, weight)
