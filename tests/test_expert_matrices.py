"""Matrices of experts, which are changed and measured like linear layers."""
from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from playground.contract import find
from playground.engine.weights.linear_blocks import LinearBlocks, linear_layers
from playground.engine.weights.shared_network import sharing
from playground.training.weights.weight_report import layer_errors

IDS = torch.randint(3, 90, (30,), generator=torch.Generator().manual_seed(1)).tolist()


def mixture() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        initializer_range=0.3)).eval()


@pytest.fixture
def routed():
    """A network, its experts, and what its router read and chose for a text."""
    network, seen = mixture(), []
    experts = network.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, given: seen.append(given[:2]))
    with torch.no_grad():
        network(input_ids=torch.tensor([IDS]))
    return network, experts, *seen[0]


@pytest.mark.oracle
def test_inputs_of_an_experts_matrices_are_the_rows_that_are_sent_to_it(routed):
    network, experts, hidden, chosen = routed
    found = next(iter(LinearBlocks(network, [IDS]))).inputs()
    for index in range(4):
        rows = hidden[[index in own for own in chosen.tolist()]]
        gate, up = (rows @ experts.gate_up_proj[index].T).detach().chunk(2, -1)
        name = f"model.layers.0.mlp.experts.{index}"
        assert torch.allclose(found[f"{name}.gate_up_proj"], rows, atol=1e-5)
        assert torch.allclose(found[f"{name}.down_proj"], gate.sigmoid() * gate * up, atol=1e-4)


def test_every_change_reaches_the_experts_and_copies_them_before_the_first_one():
    network = mixture()
    twin = sharing("toy", network)
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    find("rtn")(bits=3, group=16).change(LinearBlocks(twin))
    for part in ("gate_up_proj", "down_proj"):
        old, new = (getattr(each.model.layers[0].mlp.experts, part) for each in (network, twin))
        assert all(torch.equal(own, find("rtn")(bits=3, group=16).changed(was.detach(), None).weight)
                   for own, was in zip(new, old))
    assert all(torch.equal(weight, before[name]) for name, weight in network.named_parameters())
    assert twin.model.layers[0].mlp.gate.weight.data_ptr() == network.model.layers[0].mlp.gate.weight.data_ptr()


@pytest.mark.oracle
def test_the_error_of_an_expert_is_that_of_its_output_on_its_own_rows(routed):
    network, experts, hidden, chosen = routed
    twin = sharing("toy", network)
    name = "model.layers.0.mlp.experts.2.gate_up_proj"
    matrix = linear_layers(twin)[name]
    matrix.weight = matrix.weight.round(decimals=1)
    rows, old = hidden[(chosen == 2).any(-1)], experts.gate_up_proj[2].detach()
    expected = float((rows @ (old.round(decimals=1) - old).T).norm() / (rows @ old.T).norm())
    errors = layer_errors(network, twin, [IDS])
    assert errors.pop(name) == pytest.approx(expected, rel=1e-4) and expected > 0
    assert not any(errors.values())
