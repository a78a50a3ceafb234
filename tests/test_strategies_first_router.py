"""FiRST: routers vote on the prompt, and the layers they leave out are gone for the whole text."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from runs import figures, run

from playground.contract import find
from playground.contract.lane_config import LaneConfig
from playground.events import Note
from playground.training.calibration import CalibrationTexts
from support.compute_runs import PROMPT, deep, deep_network, policy_lane
from support.policy_fits import finished, fitted_lane, training_texts

FIRST = find("first_router")
COLLAPSES = {
    "first_router": [
        Collapse(policy_lane("first_router", budget=0), LaneConfig("greedy")),
        Collapse(policy_lane("first_router", first=16), LaneConfig("greedy")),
        Collapse(policy_lane("first_router", "sample", budget=0), LaneConfig("sample")),
    ],
}
LAYERS, WIDTH = 6, 32
TRAINING = FIRST.calibrate.__func__.__globals__["train_routers"].__globals__


def routers(seed: int = 3) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {"router.weight": torch.randn(LAYERS, WIDTH, generator=chance),
            "router.bias": torch.randn(LAYERS, generator=chance)}


def with_adapters(weights: dict) -> dict:
    chance, shapes = torch.Generator().manual_seed(5), {"gate": (48, 32), "up": (48, 32), "down": (32, 48)}
    for name, (rows, columns) in shapes.items():
        weights[f"{name}.a"] = torch.randn(LAYERS, 8, columns, generator=chance) * 0.2
        weights[f"{name}.b"] = torch.randn(LAYERS, rows, 8, generator=chance) * 0.2
    return weights


@torch.no_grad()
def votes_by_hand(weights: dict, prompt: list[int], policy) -> list[bool]:
    """Which layers run: the library's layers in turn, each only if its router's mean reaches the threshold."""
    network, kept = deep_network(), []
    inner = network.model
    x = inner.embed_tokens(torch.tensor([prompt]))
    places = torch.arange(len(prompt))[None]
    angles = inner.rotary_emb(x, places)
    mask = torch.full((len(prompt), len(prompt)), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    for number, layer in enumerate(inner.layers):
        scores = torch.sigmoid(x[0].float() @ weights["router.weight"][number] + weights["router.bias"][number])
        share = (scores >= 0.5).float().mean() if policy.vote == "majority" else scores.mean()
        kept.append(number < policy.first or number >= LAYERS - policy.last or bool(share >= policy.threshold))
        if kept[-1] or policy.prefill == "whole":
            x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)
    return kept


@torch.no_grad()
def text_without(kept: list[bool], weights: dict, length: int = 12) -> list[int]:
    """Greedy text of the library's network with the other layers deleted and the adapters added."""
    network, ids = deep_network(), list(PROMPT)
    for number, layer in enumerate(network.model.layers):
        for name in ("gate", "up", "down") if "gate.a" in weights else ():
            change = weights[f"{name}.b"][number] @ weights[f"{name}.a"][number]
            getattr(layer.mlp, f"{name}_proj").weight += change.double()
    network.model.layers = torch.nn.ModuleList(
        layer for keeps, layer in zip(kept, network.model.layers) if keeps
    )
    network.config.num_hidden_layers = sum(kept)
    for _ in range(length):
        ids.append(int(network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


class VotesByTheLastToken(FIRST):
    """Takes the probability at the last token of the prompt."""

    def take_vote(self, layer, hidden):
        super().take_vote(layer, hidden[-1:])


class VotesAgainForEveryToken(FIRST):
    """Asks the routers in every forward, so that layers lack keys and values of earlier tokens."""

    def choices(self, positions, prompt):
        self._votes = []
        return super().choices(positions, prompt + 100)


def agrees(cls, monkeypatch, knobs: dict, weights: dict) -> bool:
    lane, _ = fitted_lane(cls(**knobs), weights, monkeypatch)
    return lane.tokens == text_without(votes_by_hand(weights, PROMPT, cls(**knobs)), weights)


CASES = [({}, routers()), ({"vote": "majority", "threshold": 0.6, "first": 0, "last": 0}, routers(8)),
         ({}, with_adapters(routers(4))), ({"threshold": 1.01, "first": 0, "last": 0}, routers())]


@pytest.mark.oracle("first_router")
@pytest.mark.parametrize("knobs, weights", CASES, ids=["mean", "majority", "adapters", "nothing"])
def test_the_text_is_that_of_the_network_without_the_layers_that_were_voted_out(knobs, weights, monkeypatch):
    assert agrees(FIRST, monkeypatch, knobs, weights)


@pytest.mark.refuses("first_router")
@pytest.mark.parametrize("cls", [VotesByTheLastToken, VotesAgainForEveryToken])
def test_that_network_refuses_other_votes(cls, monkeypatch):
    assert not all(agrees(cls, monkeypatch, knobs, weights) for knobs, weights in CASES[:2])


def test_a_whole_prefill_leaves_keys_of_every_layer_and_the_text_runs_through_the_kept_ones(monkeypatch):
    policy = {"prefill": "whole"}
    lane, events = fitted_lane(FIRST(**policy), routers(), monkeypatch)
    kept = votes_by_hand(routers(), PROMPT, FIRST(**policy))
    shown = figures(events, "votes of the routers on the prompt")[0]["labels"]
    assert [label.endswith("kept") for label in shown] == kept and not all(kept)
    assert lane.target.store.keys[kept.index(False)].heads and lane.tokens[:len(PROMPT) + 1] == whole_start()


def whole_start() -> list[int]:
    """The prompt and its first token, which the whole network chooses."""
    lane, _ = run(LaneConfig("greedy"), {"target": deep()}, PROMPT, 1)
    return lane.tokens


def test_the_vote_depends_on_the_prompt_alone(monkeypatch):
    votes = []
    for length, decoder in ((4, "greedy"), (9, "sample")):
        _, events = fitted_lane(FIRST(), routers(), monkeypatch, length, decoder)
        votes.append(figures(events, "votes of the routers on the prompt"))
    assert votes[0] == votes[1] and len(votes[0]) == 1


def test_without_a_fit_the_layers_that_turn_least_are_left_out_and_it_says_so():
    lane, events = run(policy_lane("first_router", budget=2), {"target": deep()}, PROMPT, 6)
    data = figures(events, "turn of the prompt's states")[0]
    out = [number for number, label in enumerate(data["labels"]) if label.endswith("left out")]
    assert out == sorted(sorted(range(1, 5), key=data["values"].__getitem__)[:2])
    assert "which is not the method" in next(event.text for event in events if isinstance(event, Note))


@pytest.mark.slow
def test_training_keeps_fewer_layers_the_more_a_running_layer_costs(monkeypatch):
    kept = []
    monkeypatch.setitem(TRAINING, "OPEN", 0.3)
    monkeypatch.setattr("playground.training.calibration.BATCH", 100)
    for cost in (0.0, 6.0):
        monkeypatch.setitem(TRAINING, "EXECUTED", cost)
        weights, seen = finished(FIRST.calibrate(CalibrationTexts(deep(), training_texts(40), 0), 0))
        notes = [event.text for event in seen if isinstance(event, Note)]
        kept.append(float(notes[0].split(": ")[1].split()[0]))
        assert weights["router.weight"].shape == (LAYERS, WIDTH) and weights["down.b"].shape == (LAYERS, 32, 8)
    assert kept[1] < kept[0]
