"""RD-Prune's distortions against copies of the network, its choice against trying everything, and wrong variants."""
from __future__ import annotations

from copy import deepcopy
from itertools import product

import pytest
import torch
from toys import network

from playground.contract import Strategy, find
from playground.engine.weights.linear_blocks import LinearBlocks
from support.wrong_variants import refused

RDPrune = find("rd_prune")
TEXTS = torch.randint(3, 320, (2, 12), generator=torch.Generator().manual_seed(0)).tolist()
BLOCK = "model.layers.1."


class SecondLayerAlone(LinearBlocks):
    """A network of which one decoder layer is changed, so that all choices can be tried."""

    def __iter__(self):
        return iter(self.blocks[1:])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in TEXTS])


def smallest_gone(weight: torch.Tensor, share: float) -> torch.Tensor:
    edge = weight.abs().flatten().sort().values[int(share * weight.numel()):][:1]
    return torch.where(weight.abs() >= edge, weight, 0) if len(edge) else torch.zeros_like(weight)


def own_curves() -> dict[str, list[tuple[float, int]]]:
    """Mean squares of what the logits change by, and weights that stay, at no, half and all of each matrix."""
    plain, found = network(), {}
    for name, layer in plain.model.layers[1].named_modules():
        if isinstance(layer, torch.nn.Linear):
            found[BLOCK + name] = []
            for share in (0, 0.5, 1):
                copy = deepcopy(plain)
                target = copy.get_submodule(BLOCK + name)
                target.weight.data = smallest_gone(layer.weight.data, share)
                moved = float((logits(copy) - logits(plain)).square().mean())
                found[BLOCK + name].append((moved, int((target.weight != 0).sum())))
    return found


def check_choice(cls: type[Strategy]) -> None:
    """Of all levels that keep at most 40 percent of the weights, those with the least sum of distortions are taken."""
    curves = own_curves()
    blocks = SecondLayerAlone(network(), TEXTS)
    cls(sparsity=0.6, levels=2).change(blocks)
    kept = {name: int((blocks.weight(name) != 0).sum()) for name in curves}
    chosen = sum(next(error for error, size in curves[name] if size == kept[name]) for name in curves)
    budget = 0.4 * sum(own[0][1] for own in curves.values())
    fitting = [picks for picks in product(*curves.values()) if sum(size for _, size in picks) <= budget]
    assert sum(kept.values()) <= budget
    assert chosen == pytest.approx(min(sum(error for error, _ in picks) for picks in fitting), rel=1e-3)


class TheSameEverywhere(RDPrune):
    def curves(self, blocks):
        for name, own in super().curves(blocks):
            yield name, [(level, weight) for level, (_, weight) in enumerate(own)]


class KeepsMore(RDPrune):
    def change(self, blocks):
        super(KeepsMore, type(self)(sparsity=0.4, levels=2)).change(blocks)


@pytest.mark.oracle("rd_prune")
def test_the_levels_are_the_best_of_all_within_the_budget():
    check_choice(RDPrune)


@pytest.mark.refuses("rd_prune")
@pytest.mark.parametrize("wrong", [TheSameEverywhere, KeepsMore])
def test_other_levels_are_noticed(wrong):
    refused(check_choice, wrong)


@pytest.mark.oracle
def test_distortions_are_those_of_a_copy_that_is_pruned_in_one_matrix():
    blocks, expected = SecondLayerAlone(network(), TEXTS), own_curves()
    for name, own in RDPrune(levels=2).curves(blocks):
        assert [error for error, _ in own] == pytest.approx([error for error, _ in expected[name]], rel=1e-3, abs=1e-9)


def test_measuring_leaves_the_network_as_it_was():
    blocks = LinearBlocks(network(), TEXTS)
    before = {name: weight.clone() for name, weight in blocks.network.named_parameters()}
    list(RDPrune(levels=2).curves(blocks))
    assert all(torch.equal(weight, before[name]) for name, weight in blocks.network.named_parameters())
    assert torch.equal(logits(blocks.network), logits(network()))


@pytest.mark.parametrize(("sparsity", "zeros"), [(0.0, 0.0), (1.0, 1.0)])
def test_no_sparsity_keeps_every_tensor_and_all_of_it_leaves_nothing(sparsity, zeros):
    blocks = LinearBlocks(network(), TEXTS)
    before = {name: layer.weight for name, layer in blocks.layers.items()}
    RDPrune(sparsity=sparsity, levels=2).change(blocks)
    assert all(float((layer.weight == 0).float().mean()) == zeros for layer in blocks.layers.values())
    assert zeros or all(layer.weight is before[name] for name, layer in blocks.layers.items())


def network_with_a_dead_layer():
    model = network()
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    return model


def test_a_matrix_that_nothing_reads_is_pruned_first():
    blocks = LinearBlocks(network_with_a_dead_layer(), TEXTS)
    RDPrune(sparsity=0.1, levels=2, distortion="KL").change(blocks)
    pruned = {name for name in blocks.layers if not blocks.weight(name).all()}
    assert pruned <= {BLOCK + f"self_attn.{kind}_proj" for kind in "qkvo"} and len(pruned) > 1
    assert torch.equal(logits(blocks.network), logits(network_with_a_dead_layer()))
