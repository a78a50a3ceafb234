"""Duo-LLM: every token takes a large or a small feed-forward network in each layer."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from runs import figures, run
from torch.nn.functional import silu

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from playground.events import Note
from playground.training.calibration import CalibrationTexts
from support.compute_runs import PROMPT, deep, deep_network, policy_lane
from support.policy_fits import finished, fitted_lane, greedy_text, training_texts

DUO = find("duo_llm")
COLLAPSES = {
    "duo_llm": [
        Collapse(policy_lane("duo_llm", mode="big"), LaneConfig("greedy")),
        Collapse(policy_lane("duo_llm"), LaneConfig("greedy")),
        Collapse(policy_lane("duo_llm", mode="random", big_layers=32), LaneConfig("greedy")),
        Collapse(policy_lane("duo_llm", "sample", mode="pattern"), LaneConfig("sample")),
    ],
}
LAYERS, WIDTH, NARROW = 6, 32, 3
TRAINING = DUO.calibrate.__func__.__globals__["train_duo"].__globals__


def weights_at_random(seed: int = 1) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    sizes = {"small.gate": (NARROW, WIDTH), "small.up": (NARROW, WIDTH), "small.down": (WIDTH, NARROW),
             "router.0.5": (2, WIDTH)}
    return {name: torch.randn(LAYERS, *size, generator=chance) for name, size in sizes.items()}


def with_routes(weights: dict, takes_large):
    """The library's network; takes_large(layer, rows) says which rows keep the network's own FFN."""
    network = deep_network()
    for number, layer in enumerate(network.model.layers):
        gate, up, down = (weights[f"small.{name}"][number].double() for name in ("gate", "up", "down"))
        own = type(layer.mlp).forward

        def forward(x, mlp=layer.mlp, own=own, gate=gate, up=up, down=down, number=number):
            small = (silu(x @ gate.T) * (x @ up.T)) @ down.T
            return torch.where(takes_large(number, x)[..., None], own(mlp, x), small)

        layer.mlp.forward = forward
    return network


def routed(weights: dict):
    """The network whose tokens take the large FFN if the router's first score is at least its second."""
    def takes_large(number, x):
        scores = x.float() @ weights["router.0.5"][number].T
        return scores[..., 0] >= scores[..., 1]

    return with_routes(weights, takes_large)


class TakesTheOther(DUO):
    """Reads the two scores the wrong way round."""

    def route(self, layer, hidden, positions):
        return ["S" if taken == "B" else "B" for taken in super().route(layer, hidden, positions)]


class RoutesBeforeTheNorm(DUO):
    """The routers read the hidden states, not their norm."""

    def begin(self, parts, weights):
        super().begin(parts, weights)
        self._norm = lambda layer, hidden: hidden - hidden.mean(-1, keepdim=True) + 0.3


def agrees(cls, monkeypatch) -> bool:
    weights = weights_at_random()
    lane, _ = fitted_lane(cls(), weights, monkeypatch)
    return lane.tokens == greedy_text(routed(weights))


@pytest.mark.oracle("duo_llm")
def test_the_text_is_that_of_a_network_that_computes_both_and_takes_one(monkeypatch):
    _, events = fitted_lane(DUO(), weights_at_random(), monkeypatch)
    large = [data["series"]["large"] for data in figures(events, "large FFNs of a token")]
    assert agrees(DUO, monkeypatch) and 0 < sum(large) < LAYERS * len(large), "both networks are taken"


@pytest.mark.refuses("duo_llm")
@pytest.mark.parametrize("cls", [TakesTheOther, RoutesBeforeTheNorm])
def test_that_network_refuses_turned_scores_and_other_states(cls, monkeypatch):
    assert not agrees(cls, monkeypatch)


@pytest.mark.parametrize("pattern", ["SSSSSS", "BSBSSB"])
def test_a_pattern_runs_the_same_networks_for_every_token(pattern, monkeypatch):
    weights = weights_at_random()
    lane, _ = fitted_lane(DUO(mode="pattern", pattern=pattern), weights, monkeypatch)
    fixed = with_routes(weights, lambda number, x: torch.full(x.shape[:-1], pattern[number] == "B"))
    assert lane.tokens == greedy_text(fixed)


def test_none_leaves_out_the_network():
    lane, _ = run(policy_lane("duo_llm", mode="pattern", pattern="B00BBB"), {"target": deep()}, PROMPT, 12)
    network = deep_network()
    for layer in network.model.layers[1:3]:
        layer.mlp.down_proj.weight.data.zero_()
    assert lane.tokens == greedy_text(network)


def test_a_random_route_has_the_wanted_number_of_large_networks_and_repeats():
    routes = []
    for _ in range(2):
        _, events = run(policy_lane("duo_llm", mode="random", big_layers=2), {"target": deep()}, PROMPT, 8)
        routes.append([data["values"] for data in figures(events, "width of the FFN that each layer took")])
    assert routes[0] == routes[1] and {route.count(1.0) for route in routes[0]} == {2}
    assert len({tuple(route) for route in routes[0]}) > 2, "tokens differ"


def test_training_brings_mixtures_closer_and_routers_towards_their_target(monkeypatch):
    monkeypatch.setitem(TRAINING, "TARGETS", (0.25,))
    weights, seen = finished(DUO.calibrate(CalibrationTexts(deep(), training_texts(), 0), 0))
    assert weights["small.down"].shape == (LAYERS, WIDTH, NARROW) and weights["router.0.25"].shape == (LAYERS, 2, WIDTH)
    shares = [event for event in seen if isinstance(event, Note)]
    assert len(shares) == 3 and shares[-1].text.startswith("Target 0.25")


def test_with_equal_networks_every_route_is_the_model(monkeypatch):
    network = deep_network()
    projections = [(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight)
                   for layer in network.model.layers]
    names = ("gate", "up", "down")
    weights = {f"small.{name}": torch.stack([each[place].detach() for each in projections])
               for place, name in enumerate(names)}
    lane, _ = fitted_lane(DUO(mode="random", big_layers=3), weights, monkeypatch)
    assert lane.tokens == greedy_text(network)


@pytest.mark.parametrize("pattern, message", [("BXB", "letters B, S and 0"), ("BB", "a letter for each")])
def test_other_letters_and_other_lengths_are_refused(pattern, message):
    with pytest.raises(Refusal, match=message):
        run(policy_lane("duo_llm", mode="pattern", pattern=pattern), {"target": deep()}, PROMPT, 4)
