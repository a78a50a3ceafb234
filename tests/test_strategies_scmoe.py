"""SCMoE: experts chosen by rank, and the contrast of two passes of one mixture of experts."""
from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from architectures import tiny
from pairs import network, pair
from registry import Collapse
from runs import figures, run
from toys import byte_tokenizer

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.engine.expert_routing import ExpertRouting
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.errors import Refusal

PROMPT = [5, 9, 2, 7, 7, 1]
MIXTURES = ("mixtral", "olmoe", "qwen3_moe")
SCMOE = find("scmoe")
COLLAPSES = {
    "scmoe": [
        Collapse(LaneConfig("greedy", {}, [("scmoe", {"beta": 0.0})]), LaneConfig("greedy")),
        Collapse(LaneConfig("greedy", {}, [("scmoe", {"alpha": 1.0})]), LaneConfig("greedy")),
    ],
}


def text(lane: LaneConfig | Assembly, models: dict, length: int) -> list[int]:
    """Prompt and text of a lane, both passes of which read the whole prompt."""
    return run(lane, models, PROMPT, length, other=PROMPT)[0].tokens


def read(model: Model, ranks: tuple[int, ...] | None = None) -> torch.Tensor:
    plan = LayerPlan(routing=ExpertRouting(ranks)) if ranks is not None else None
    (logits,), _ = model.forward([ForwardInput(model.new_store(), PROMPT, list(range(-1, len(PROMPT) - 1)))], plan)
    return logits


def by_hand(architecture: str, ranks: tuple[int, ...] | None, make_network=network):
    """The library's network whose routers send every token to the experts of these ranks, by sorting their logits."""
    net = make_network(architecture)
    for module in net.modules():
        if ranks and hasattr(module, "top_k") and hasattr(module, "weight"):
            module.forward = lambda hidden, module=module: _sorted_choice(module, hidden, ranks)
    return net


def _sorted_choice(router, hidden, ranks):
    hidden = hidden.reshape(-1, router.weight.shape[1])
    logits = hidden @ router.weight.T
    gates, experts = [], []
    for row in logits.tolist():
        total = sum(math.exp(value - max(row)) for value in row)
        order = sorted(range(len(row)), key=lambda expert: -row[expert])
        chosen = [order[rank - 1] for rank in ranks]
        own = [math.exp(row[expert] - max(row)) / total for expert in chosen]
        share = sum(own) if getattr(router, "norm_topk_prob", True) else 1.0
        gates.append([value / share for value in own])
        experts.append(chosen)
    return logits, torch.tensor(gates, dtype=hidden.dtype), torch.tensor(experts)


def logits_of(net, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return net(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("architecture", MIXTURES)
def test_the_first_ranks_reproduce_the_model_and_nothing_stays_behind(architecture):
    model = pair(architecture).target
    plain = read(model)
    assert (read(model, (1, 2)) - plain).abs().max() < 1e-6
    assert (read(model, (2,)) - plain).abs().max() > 1e-3
    assert torch.equal(read(model), plain)


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("ranks", [(1,), (2,), (3,), (4,), (1, 2, 3, 4)], ids=str)
def test_experts_by_rank_equal_the_librarys_model_with_routers_written_by_hand(architecture, ranks):
    assert (read(pair(architecture).target, ranks) - logits_of(by_hand(architecture, ranks), PROMPT)).abs().max() < 1e-5


def sheet_text(architecture: str, beta: float, alpha: float, weak: int, length: int) -> list[int]:
    """Greedy text by the sheet, with two fresh forwards over the whole text for every token."""
    ids, strong_net, weak_net = list(PROMPT), network(architecture), by_hand(architecture, (weak,))
    for _ in range(length):
        strong, other = (logits_of(net, ids)[-1] for net in (strong_net, weak_net))
        valid = strong >= math.log(alpha) + strong.max()
        ids.append(int(((1 + beta) * strong - beta * other).masked_fill(~valid, -math.inf).argmax()))
    return ids


class CountsRanksFromZero(SCMOE):
    """Takes the released index for a rank."""

    def routings(self):
        return {"weak_experts": (self.weak + 1,)}


class ContrastsWithoutAMask(SCMOE):
    """Makes every token eligible."""

    def mix(self, rows):
        return (1 + self.beta) * rows["target"] - self.beta * rows["weak_experts"]


class ContrastsTheOtherWay(SCMOE):
    """Adds what the weak pass knows."""

    def mix(self, rows):
        return super().mix({"target": rows["target"], "weak_experts": 2 * rows["target"] - rows["weak_experts"]})


def agrees(cls) -> bool:
    for architecture, beta, weak in product(MIXTURES[:2], (0.5, 2.0), (2, 3)):
        assembly = Assembly(make("greedy"), [cls(beta=beta, alpha=0.05, weak=weak)])
        found = text(assembly, {"target": pair(architecture).target}, 10)
        if found != sheet_text(architecture, beta, 0.05, weak, 10):
            return False
    return True


@pytest.mark.slow
@pytest.mark.oracle("scmoe")
def test_the_text_is_that_of_two_library_models_contrasted_by_hand():
    assert agrees(SCMOE)


@pytest.mark.refuses("scmoe")
@pytest.mark.parametrize("cls", [CountsRanksFromZero, ContrastsWithoutAMask, ContrastsTheOtherWay])
def test_the_two_models_refuse_other_ranks_no_mask_and_a_turned_sign(cls):
    assert not agrees(cls)


def test_with_equal_experts_no_contrast_changes_the_text():
    net = tiny("mixtral")
    for module in net.modules():
        if hasattr(module, "gate_up_proj"):
            for weights in (module.gate_up_proj, module.down_proj):
                weights.data[:] = weights.data[:1].clone()
    models = {"target": Model(net, byte_tokenizer(), "mixtral")}
    plain, contrasted = (
        text(lane, models, 12)
        for lane in (LaneConfig("greedy"), LaneConfig("greedy", {}, [("scmoe", {"beta": 2.0, "weak": 3})]))
    )
    assert contrasted == plain


def test_the_strong_pass_may_run_more_experts():
    models = {"target": pair("mixtral").target}
    lane = LaneConfig("greedy", {}, [("scmoe", {"beta": 0.0, "strong": 4})])
    expected, net = list(PROMPT), by_hand("mixtral", (1, 2, 3, 4))
    for _ in range(8):
        expected.append(int(logits_of(net, expected)[-1].argmax()))
    assert text(lane, models, 8) == expected


def test_the_figure_names_the_experts_that_the_routers_chose():
    models = {"target": pair("mixtral").target}
    lane, events = run(LaneConfig("greedy", {}, [("scmoe", {"weak": 3})]), models, PROMPT, 6, other=PROMPT)
    caught, net = [], network("mixtral")
    for module in net.modules():
        if hasattr(module, "top_k") and hasattr(module, "weight"):
            module.register_forward_hook(lambda router, given, out: caught.append(out[2][-1].tolist()))
    logits_of(net, lane.tokens[:-1])
    shown = figures(events, "experts that ran: target")[-1]["values"]
    assert shown == caught and len(figures(events, "experts that ran: weak_experts")[-1]["values"][0]) == 1


@pytest.mark.parametrize("architecture, knobs, message", [
    ("llama", {}, "llama has no routers"), ("mixtral", {"weak": 5}, "asks for the expert of rank 5"),
    ("mixtral", {"strong": 9}, "asks for the expert of rank 9"),
])
def test_dense_models_and_ranks_beyond_the_last_expert_are_refused(architecture, knobs, message):
    with pytest.raises(Refusal, match=message):
        run(LaneConfig("greedy", {}, [("scmoe", knobs)]), {"target": pair(architecture).target}, PROMPT, 4)
