"""ARMOR's core steps against least squares over all choices in float64, and wrong variants against the same check."""
from __future__ import annotations

from itertools import combinations

import pytest
import torch

from playground.contract import find
from playground.errors import Refusal
from strategies.weights.armor import ArmorFit, Factors
from support.wrong_variants import refused

ARMOR = find("armor")
WIDTH = 4


def layer(out: int = 8, width: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    mixed = torch.randn(out, 5, generator=chance) @ torch.randn(5, width, generator=chance)
    return (mixed + 0.3 * torch.randn(out, width, generator=chance)).double(), torch.linspace(0.2, 2.0, width).double()


def started(fit: type[ArmorFit]) -> ArmorFit:
    """A fit whose blocks are no longer identities."""
    own = fit(*layer(), ARMOR(block=WIDTH))
    chance = torch.Generator().manual_seed(4)
    for at in (0, 2):
        own.values[at] = own.values[at] + 0.3 * torch.randn(own.values[at].shape, generator=chance)
    return own


def dense(blocks: torch.Tensor) -> torch.Tensor:
    return torch.block_diag(*blocks)


def least_loss(own: ArmorFit, before: Factors, row: int, first: int) -> float:
    """The least loss that a choice of two weights of one group has, each solved as least squares over the matrix."""
    rows, columns, scale = dense(before.rows), dense(before.columns), own.sizes.sqrt()
    without = before.core.clone()
    without[row, first:first + 4] = 0
    target = ((own.weight - rows @ without @ columns) * scale).flatten()
    effects = [(rows[:, row:row + 1] @ columns[at:at + 1] * scale).flatten() for at in range(first, first + 4)]
    found = []
    for pair in combinations(effects, 2):
        own_effects = torch.stack(pair, 1)
        values = torch.linalg.lstsq(own_effects, target[:, None]).solution
        found.append(float((own_effects @ values - target[:, None]).square().sum()))
    return min(found)


def check_core_steps(fit: type[ArmorFit]) -> None:
    """One group of each pair of blocks changes, to the choice and values with the least loss; others stay."""
    own = started(fit)
    for _ in range(4):
        before = own.factors
        own.choose_groups()
        after = own.factors
        changed = (after.core != before.core).unflatten(1, (-1, 4)).any(-1)
        assert changed.view(2, WIDTH, 3).sum(1).max() <= 1, "one group of a pair"
        for row, group in changed.nonzero().tolist():
            single = before.core.clone()
            single[row, 4 * group:4 * group + 4] = after.core[row, 4 * group:4 * group + 4]
            loss = float(own.loss(before._replace(core=single)))
            assert loss == pytest.approx(least_loss(own, before, row, 4 * group), rel=1e-6)
        assert float(own.loss(after)) <= float(own.loss(before)) + 1e-9


class KeepsItsChoice(ArmorFit):
    def _solved(self, squares, pull):
        self.choices = self.choices[:1]
        return super()._solved(squares, pull)


class ForgetsTheInputs(ArmorFit):
    def choose_groups(self):
        sizes, self.sizes = self.sizes, torch.ones_like(self.sizes)
        super().choose_groups()
        self.sizes = sizes


@pytest.mark.oracle("armor")
def test_a_group_gets_the_best_choice_and_values():
    check_core_steps(ArmorFit)


@pytest.mark.refuses("armor")
@pytest.mark.parametrize("wrong", [KeepsItsChoice, ForgetsTheInputs])
def test_other_choices_are_noticed(wrong):
    refused(check_core_steps, wrong)


@pytest.mark.oracle
def test_the_product_is_that_of_the_whole_matrices():
    found = started(ArmorFit).factors
    expected = dense(found.rows) @ found.core @ dense(found.columns)
    assert torch.allclose(found.product, expected, atol=1e-12)


def test_every_group_keeps_two_and_the_loss_ends_below_that_of_pruning():
    own = ArmorFit(*layer(), ARMOR(block=WIDTH, iterations=60))
    first = float(own.loss(own.factors))
    assert own.factors.core.equal(own.weight * own.mask)
    best = own.best()
    assert (own.factors.core != 0).unflatten(1, (-1, 4)).sum(-1).eq(2).all()
    assert float(((best - own.weight).square() * own.sizes).sum()) < 0.7 * first


def test_no_iterations_are_pruning_of_the_normalised_weights_and_four_of_four_change_nothing():
    weight, sizes = (each.float() for each in layer())
    inputs = sizes.sqrt().repeat(3, 1)
    pruned = ARMOR(block=WIDTH, iterations=0).changed(weight, inputs)
    assert (pruned.weight == 0).unflatten(1, (-1, 4)).sum(-1).eq(2).all()
    kept = pruned.weight != 0
    assert torch.allclose(pruned.weight[kept], weight[kept], rtol=1e-5)
    assert pruned.bits == 9 + 16 * WIDTH * (8 + 12) / (8 * 12)
    assert ARMOR(kept=4).changed(weight, inputs).weight is weight


def test_blocks_that_do_not_divide_a_matrix_are_refused():
    with pytest.raises(Refusal, match="Blocks of 16 do not divide a matrix of 8 by 12"):
        ARMOR().changed(torch.ones(8, 12), torch.ones(3, 12))
