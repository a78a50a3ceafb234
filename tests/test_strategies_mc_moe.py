"""MC-MoE against brute force and the library's own layer, and wrong variants against the same checks."""
from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch
from toys import network
from transformers import MixtralConfig, MixtralForCausalLM

from playground.contract import Strategy, find
from playground.engine.weights.linear_blocks import LinearBlocks
from playground.errors import Refusal
from strategies.weights.mc_moe import cheapest, costs, usage
from support.wrong_variants import refused

MCMoE = find("mc_moe")
TEXTS = torch.randint(3, 90, (4, 20), generator=torch.Generator().manual_seed(1)).tolist()
EXPERTS = 4


def mixture() -> MixtralForCausalLM:
    """Two random layers with four experts, two of which run for a token."""
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=64,
        initializer_range=0.3)).eval()


def moe_inputs(model: MixtralForCausalLM) -> torch.Tensor:
    """What the mixture of the first layer reads on all texts, [1, n, d]."""
    seen = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    with torch.no_grad():
        for ids in TEXTS:
            model(input_ids=torch.tensor([ids]))
    handle.remove()
    return torch.cat(seen, 1)


def costs_by_definition(bits: list[int], group: int = 16) -> list[list[float]]:
    """The first layer's costs, by running the library's layer once for each expert and number of bits."""
    model, mixed = mixture(), mixture().model.layers[0].mlp
    x, found = moe_inputs(model), []
    with torch.no_grad():
        probabilities = (x[0] @ mixed.gate.weight.T).softmax(-1)
        best = probabilities.topk(2).indices
        for expert in range(EXPERTS):
            mine, row = (best == expert).any(-1), []
            often = float(mine.sum()) / best.numel()
            probable = float(probabilities[mine, expert].sum() / probabilities.gather(1, best).sum())
            for width in bits:
                changed, rtn = mixture().model.layers[0].mlp, find("rtn")(bits=width, group=group)
                for part in (changed.experts.gate_up_proj, changed.experts.down_proj):
                    part[expert] = rtn.changed(part[expert].clone(), None).weight
                row.append(often * probable ** 1.5 * float((changed(x) - mixed(x)).norm()) ** 2)
            found.append(row)
    return found


def check_bits(cls: type[Strategy]) -> None:
    """The experts of the first layer have the bits of least cost of all that fit, and their weights those bits."""
    model, by_definition = mixture(), costs_by_definition([2, 3, 4])
    blocks, change = LinearBlocks(model, TEXTS), cls(budget=3.0, group=16, attention=16)
    routed = next(iter(blocks)).routed()
    matrices = [tuple(map(blocks.weight, names)) for names in routed.names]
    assert costs(change, matrices, routed) == [pytest.approx(own, rel=1e-3) for own in by_definition]
    change.change(blocks)
    fitting = [picks for picks in product(range(3), repeat=EXPERTS)
               if sum(picks) + 2 * EXPERTS <= 3 * EXPERTS and {1, 2} <= set(picks)]
    best = min(fitting, key=lambda picks: sum(own[pick] for own, pick in zip(by_definition, picks)))
    for expert, pick in enumerate(best):
        rtn = find("rtn")(bits=pick + 2, group=16)
        for part in ("gate_up_proj", "down_proj"):
            before = getattr(mixture().model.layers[0].mlp.experts, part)[expert].detach()
            expected = rtn.changed(before, None)
            assert torch.equal(getattr(model.model.layers[0].mlp.experts, part)[expert], expected.weight)
            assert blocks.bits[f"model.layers.0.mlp.experts.{expert}.{part}"] == expected.bits


class IgnoresErrors(MCMoE):
    def moved(self, own, routed, index):
        return [1.0 / bits for bits in self.widths]


class ForgetsTheGates(MCMoE):
    def moved(self, own, routed, index):
        return super().moved(own, routed._replace(gates=torch.ones_like(routed.gates)), index)


@pytest.mark.oracle("mc_moe")
def test_experts_get_the_bits_of_least_cost():
    check_bits(MCMoE)


@pytest.mark.refuses("mc_moe")
@pytest.mark.parametrize("wrong", [IgnoresErrors, ForgetsTheGates])
def test_other_bits_are_noticed(wrong):
    refused(check_bits, wrong)


@pytest.mark.oracle
def test_the_program_is_solved_as_by_trying_everything():
    chance = Random(0)
    for _ in range(100):
        costs, most = [[chance.random() for _ in range(3)] for _ in range(4)], chance.randint(7, 12)
        fitting = [picks for picks in product(range(3), repeat=4) if sum(picks) + 4 <= most and {1, 2} <= set(picks)]
        found = cheapest(costs, [1, 2, 3], most)
        assert tuple(found) in fitting
        assert sum(own[at] for own, at in zip(costs, found)) == pytest.approx(min(
            sum(own[at] for own, at in zip(costs, picks)) for picks in fitting))


def test_an_expert_that_is_used_more_never_gets_fewer_bits():
    chance = Random(1)
    for _ in range(50):
        errors = [sorted((chance.random() for _ in range(3)), reverse=True) for _ in range(4)]
        often = [chance.random() for _ in range(4)]
        before, after = (
            cheapest([[share * error for error in own] for share, own in zip(shares, errors)], [1, 2, 3], 9)
            for shares in (often, [often[0] * 3, *often[1:]]))
        assert after[0] >= before[0]


def test_usage_counts_choices_and_probabilities_over_all_experts():
    blocks = LinearBlocks(mixture(), TEXTS)
    routed = next(iter(blocks)).routed()
    often, probable = usage(routed)
    assert float(often.sum()) == pytest.approx(1) and float(probable.sum()) == pytest.approx(1)
    assert not torch.allclose(often, probable)
    assert [name for name, _ in routed.names] == [f"model.layers.0.mlp.experts.{at}.gate_up_proj" for at in range(4)]


def test_sixteen_bits_change_nothing_and_share_every_tensor():
    model = mixture()
    before = dict(model.named_parameters())
    MCMoE(budget=16.0, attention=16).change(LinearBlocks(model, TEXTS))
    assert all(weight is before[name] for name, weight in model.named_parameters())


def test_a_budget_that_is_too_small_and_a_model_without_experts_are_refused():
    with pytest.raises(Refusal, match="raise budget, or lower lowest"):
        MCMoE(budget=2.25, group=16).change(LinearBlocks(mixture(), TEXTS))
    with pytest.raises(Refusal, match="choose a mixture of experts"):
        MCMoE().change(LinearBlocks(network(), TEXTS))
