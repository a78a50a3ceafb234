"""FactorLLM: experts are parts of a feed-forward network, and a token runs those that its router scores highest."""
from __future__ import annotations

from itertools import combinations

import pytest
import torch
from registry import Collapse
from runs import figures, run
from torch.nn.functional import silu

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.events import Forward, Note
from playground.training.calibration import CalibrationTexts
from support.compute_runs import PROMPT, deep, deep_network, policy_lane
from support.policy_fits import finished, fitted_lane, greedy_text, training_texts

FACTOR = find("factor_llm")
COLLAPSES = {
    "factor_llm": [
        Collapse(policy_lane("factor_llm", run=4), LaneConfig("greedy")),
        Collapse(policy_lane("factor_llm", "sample", run=4, choice="oracle"), LaneConfig("sample")),
    ],
}
LAYERS, WIDTH, EXPERTS = 6, 32, 4
TRAINING = FACTOR.calibrate.__func__.__globals__["train_routers"].__globals__


def routers_at_random(seed: int = 3) -> dict[str, torch.Tensor]:
    return {"router": torch.randn(LAYERS, EXPERTS, WIDTH, generator=torch.Generator().manual_seed(seed))}


def sparse_network(count: int, choose, scale: float):
    """The library's network with masks over the channels: of every row the experts that `choose` names stay."""
    network = deep_network()
    for number, layer in enumerate(network.model.layers):
        mlp, size = layer.mlp, layer.mlp.gate_proj.weight.shape[0] // EXPERTS

        def forward(x, mlp=mlp, size=size, number=number):
            channels = silu(mlp.gate_proj(x)) * mlp.up_proj(x)
            mask = torch.zeros_like(channels)
            for at, row in enumerate(x[0]):
                for expert in choose(number, row, channels[0, at], mlp.down_proj.weight):
                    mask[0, at, expert * size:(expert + 1) * size] = 1
            return scale * mlp.down_proj(channels * mask)

        mlp.forward = forward
    return network


def by_router(weights: dict, count: int):
    def choose(number, row, channels, down):
        found = (weights["router"][number] @ row.float()).tolist()
        return sorted(range(EXPERTS), key=lambda expert: -found[expert])[:count]

    return choose


def by_trying(count: int):
    def choose(number, row, channels, down):
        size = len(channels) // EXPERTS
        parts = [down[:, at * size:(at + 1) * size] @ channels[at * size:(at + 1) * size] for at in range(EXPERTS)]
        choices = list(combinations(range(EXPERTS), count))
        errors = [float((EXPERTS / count * sum(parts[at] for at in choice) - down @ channels).norm())
                  for choice in choices]
        return next(choice for choice, error in zip(choices, errors) if error < min(errors) * 1.00001)

    return choose


def check_text(cls, monkeypatch, **knobs) -> None:
    weights = routers_at_random()
    for count in (1, 2, 3):
        lane, _ = fitted_lane(cls(run=count, **knobs), weights, monkeypatch, 8)
        choose = by_trying(count) if knobs else by_router(weights, count)
        assert lane.tokens == greedy_text(sparse_network(count, choose, EXPERTS / count), 8)


class ForgetsTheScale(FACTOR):
    def begin(self, parts, weights):
        self.scale = False
        super().begin(parts, weights)


class LowestScores(FACTOR):
    def choose(self, layer, hidden, positions):
        return ~super().choose(layer, hidden, positions)


@pytest.mark.oracle("factor_llm")
@pytest.mark.parametrize("knobs", [{}, {"choice": "oracle"}])
def test_the_text_is_that_of_a_network_whose_other_channels_are_masked(knobs, monkeypatch):
    check_text(FACTOR, monkeypatch, **knobs)


@pytest.mark.refuses("factor_llm")
@pytest.mark.parametrize("wrong", [ForgetsTheScale, LowestScores])
def test_that_network_refuses_other_choices(wrong, monkeypatch):
    with pytest.raises(AssertionError):
        check_text(wrong, monkeypatch)


def test_each_token_runs_its_number_of_experts_and_fewer_cost_less(monkeypatch):
    flops = []
    for count in (1, 2, 4):
        _, events = fitted_lane(FACTOR(run=count), routers_at_random(), monkeypatch, 6)
        flops.append(sum(event.flops for event in events if isinstance(event, Forward)))
        ran = figures(events, "experts that ran for the newest token")
        assert all(sum(row) == count for data in ran for row in data["values"]) and bool(ran) == (count < 4)
    assert flops[0] < flops[1] < flops[2]


def test_labels_are_the_experts_whose_outputs_are_nearest_to_their_share_of_the_whole():
    outputs = torch.zeros(EXPERTS, 1, 3)
    outputs[2, 0], outputs[0, 0] = torch.tensor([4.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    assert TRAINING["nearest_experts"](outputs).tolist() == [[1, 0, 1, 0]]
    labels = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    assert float(TRAINING["router_loss"](labels + 3, labels)) == pytest.approx(0, abs=1e-6)
    assert float(TRAINING["router_loss"](1 - labels, labels)) > 0.1
    even, one = torch.eye(4).repeat(2, 1) * 9 + torch.eye(4)[[1, 2, 3, 0]].repeat(2, 1), torch.tensor([[9.0, 8, 0, 0]])
    assert float(TRAINING["balance_loss"](even)) < float(TRAINING["balance_loss"](one.repeat(8, 1)))


def test_parts_cover_all_channels_also_if_they_do_not_divide():
    gate, down = torch.arange(10.0)[:, None], torch.arange(10.0)[None]
    parts = TRAINING["cut"]((gate, gate, down))
    assert [len(part[0]) for part in parts] == [3, 3, 3, 1]
    assert torch.equal(torch.cat([part[0] for part in parts]), gate)


@pytest.mark.slow
def test_training_brings_the_routers_nearer_to_the_labels(monkeypatch):
    monkeypatch.setattr("playground.training.calibration.BATCH", 60)
    weights, seen = finished(FACTOR.calibrate(CalibrationTexts(deep(), training_texts(20), 0), 0))
    assert weights["router"].shape == (LAYERS, EXPERTS, WIDTH) and bool(weights["router"].isfinite().all())
    curves = [event.data["series"]["router"] for event in seen if getattr(event, "shape", "") == "scalar"]
    assert curves[-1] < curves[0]


def test_without_a_fit_the_choice_is_random_and_it_says_so():
    _, events = run(policy_lane("factor_llm"), {"target": deep()}, PROMPT, 4)
    assert next(event.text for event in events if isinstance(event, Note)).startswith("No routers for this model")
