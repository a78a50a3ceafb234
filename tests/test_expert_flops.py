"""FLOPs of a mixture of experts: the experts that run for a row are counted, and no others."""
from __future__ import annotations

import pytest
import torch
from pairs import network, pair
from runs import figures, run
from torch.nn import functional

from playground.contract.lane_config import LaneConfig
from playground.engine.expert_routing import ExpertRouting, expert_weights
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.events import Forward

PROMPT = [5, 9, 2, 7, 7, 1]
MIXTURES = ("mixtral", "olmoe", "qwen3_moe")


def multiplied(model, ranks: tuple[int, ...], monkeypatch) -> int:
    """Products of rows and weights in one forward, counted in torch's own linear layers."""
    total, linear = [0], functional.linear

    def counting(rows, weight, bias=None):
        total[0] += rows.numel() // rows.shape[-1] * weight.numel()
        return linear(rows, weight, bias)

    monkeypatch.setattr(functional, "linear", counting)
    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    work = ForwardInput(model.new_store(), PROMPT, list(range(-1, len(PROMPT) - 1)))
    model.forward([work], LayerPlan(routing=ExpertRouting(ranks)))
    monkeypatch.undo()
    return total[0]


@pytest.mark.parametrize("architecture", MIXTURES)
def test_flops_grow_with_the_experts_that_run_as_the_products_do(architecture, monkeypatch):
    model, rows = pair(architecture).target, len(PROMPT)
    counted = [multiplied(model, ranks, monkeypatch) for ranks in ((1,), (1, 2), (1, 2, 3, 4))]
    flops = [model.flops(rows, 0, model.depth, experts) for experts in (1, 2, 4)]
    assert [b - a for a, b in zip(flops, flops[1:])] == [2 * (b - a) for a, b in zip(counted, counted[1:])]
    assert model.flops(rows, 0, model.depth) == flops[1], "the routers choose two"


def test_a_dense_model_has_no_idle_experts():
    assert expert_weights(network("llama")).idle() == 0


def test_a_lane_reports_the_experts_of_each_pass():
    model = pair("mixtral").target
    lane = LaneConfig("greedy", {}, [("scmoe", {"weak": 2})])
    _, events = run(lane, {"target": model}, PROMPT, 5, other=PROMPT)
    passes = {event.stream: event for event in events if isinstance(event, Forward) and event.tokens == 1}
    weak, strong = passes["weak_experts"], passes["target"]
    assert strong.flops == model.flops(1, strong.context, model.depth)
    assert weak.flops == model.flops(1, weak.context, model.depth, 1) < strong.flops


def test_a_plain_lane_shows_what_the_routers_chose():
    _, events = run(LaneConfig("greedy"), {"target": pair("mixtral").target}, PROMPT, 4)
    shown = figures(events, "experts that ran: target")
    assert len(shown) == 3 and all(len(row) == 2 for row in shown[0]["values"])
