"""LQ-LoRA's decomposition against exact singular values and brute force, and wrong variants against the same checks."""
from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch
from toys import network

from playground.algorithms.weights.budgeted_choices import cheapest
from playground.contract import Strategy, find
from playground.engine.weights.linear_blocks import LinearBlocks
from playground.errors import Refusal
from strategies.weights import lq_lora
from strategies.weights.lq_lora import levels, low_rank, normal_float
from support.wrong_variants import refused

LQLoRA = find("lq_lora")
NF4 = [-1, -.6962, -.5251, -.3949, -.2844, -.1848, -.0911, 0, .0796, .1609, .2461, .3379, .4407, .5626, .7230, 1]


def matrix(out: int = 48, width: int = 64, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    strong = torch.randn(out, 4, generator=chance) @ torch.randn(4, width, generator=chance)
    return strong + 0.5 * torch.randn(out, width, generator=chance)


def by_definition(weight: torch.Tensor, bits: int, rank: int, rounds: int) -> list[float]:
    """Squared errors of the rounds with a whole singular value decomposition."""
    quantised, errors = torch.zeros_like(weight), []
    for _ in range(rounds):
        u, s, v = torch.linalg.svd(weight - quantised)
        part = (u[:, :rank] * s[:rank]) @ v[:rank]
        quantised = normal_float(weight - part, bits)
        errors.append(float((weight - part - quantised).square().sum()))
        if len(errors) > 1 and errors[-1] > errors[-2]:
            break
    return errors


def check_decomposition(cls: type[Strategy]) -> None:
    """The error is the least of the rounds, to what a randomised decomposition loses, and is that of the weights."""
    for seed in range(3):
        weight = matrix(seed=seed)
        found = cls(bits=2, rank=4, rounds=8).changed(weight, None)
        error = float((found.weight - weight).square().sum())
        assert error == pytest.approx(min(by_definition(weight, 2, 4, 8)), rel=0.02)
        assert found.bits == (48 * 64 * 2 + 48 * 8 + 32 + 32 + 16 * 4 * (48 + 64)) / (48 * 64)


class OneRound(LQLoRA):
    def choice(self, weight, bits):
        return find("lq_lora")(rank=self.rank, rounds=1).choice(weight, bits)


class ForgetsTheFactors(LQLoRA):
    def changed(self, weight, inputs):
        found = super().changed(weight, inputs)
        return found._replace(bits=lq_lora.stored_bits(weight, self.bits) / weight.numel())


@pytest.mark.oracle("lq_lora")
def test_the_best_round_of_product_and_rounding_is_kept():
    check_decomposition(LQLoRA)


@pytest.mark.refuses("lq_lora")
@pytest.mark.parametrize("wrong", [OneRound, ForgetsTheFactors])
def test_wrong_decompositions_are_noticed(wrong):
    refused(check_decomposition, wrong)


def test_the_grid_of_four_bits_is_nf4_and_numbers_are_rounded_to_the_nearest():
    assert levels(4).tolist() == pytest.approx(NF4, abs=1e-4)
    weight = torch.linspace(-1, 1, 64)[None]  # one block of scale 1
    expected = [min(levels(3).tolist(), key=lambda level: abs(level - value)) for value in weight[0].tolist()]
    assert normal_float(weight, 3)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_rank_zero_is_rounding_alone_and_a_full_rank_leaves_no_error():
    weight = matrix()
    assert torch.equal(LQLoRA(bits=3, rank=0).changed(weight, None).weight, normal_float(weight, 3))
    assert torch.allclose(LQLoRA(bits=3, rank=64).changed(weight, None).weight, weight, atol=1e-4)


def test_the_randomised_product_is_nearly_the_best_of_its_rank():
    weight = matrix()
    left = torch.linalg.svdvals(weight)[4:].square().sum().sqrt()
    assert float((weight - low_rank(weight, 4, torch.Generator().manual_seed(0))).norm()) < 1.01 * float(left)


@pytest.mark.oracle
def test_bits_are_given_out_as_by_trying_everything():
    chance = Random(0)
    for _ in range(50):
        choices = [[(chance.random(), chance.randint(1, 30)) for _ in range(4)] for _ in range(4)]
        budget = chance.randint(40, 100)
        fitting = [picks for picks in product(range(4), repeat=4)
                   if sum(own[at][1] for own, at in zip(choices, picks)) <= budget]
        if not fitting:
            continue
        best = min(sum(own[at][0] for own, at in zip(choices, picks)) for picks in fitting)
        found = cheapest(choices, budget)
        assert sum(own[at][1] for own, at in zip(choices, found)) <= budget
        assert sum(own[at][0] for own, at in zip(choices, found)) == pytest.approx(best)


def test_a_budget_holds_over_the_whole_network_and_one_that_is_too_small_is_refused():
    blocks = LinearBlocks(network())
    LQLoRA(budget=4.0, rank=1, rounds=2).change(blocks)
    sizes = {name: layer.weight.numel() for name, layer in blocks.layers.items()}
    spent = sum(sizes[name] * bits for name, bits in blocks.bits.items()) / sum(sizes.values())
    assert 3.0 < spent <= 4.0 and len(set(blocks.bits.values())) > 1
    with pytest.raises(Refusal, match="raise it, or lower the rank"):
        LQLoRA(budget=1.0).change(LinearBlocks(network()))
