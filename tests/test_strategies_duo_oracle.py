"""The oracle of Duo-LLM: the best route of every token of a given text, by trying all of them."""
from __future__ import annotations

from itertools import product

import pytest
import torch
from runs import figures, run

from playground.contract import find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.errors import Refusal
from support.compute_runs import PROMPT, deep, deep_network

BRIEF = {"duo_oracle": {"text": "ab"}}
ORACLE = find("duo_oracle")
LAYERS, TEXT = 3, "fox"


def network():
    return deep_network(num_hidden_layers=LAYERS)


@torch.no_grad()
def loss(route: tuple[str, ...], ids: list[int], following: int) -> float:
    """Loss of the next token if only the last token of a text takes this route, in a forward of its own."""
    net = network()
    for taken, layer in zip(route, net.model.layers):
        own, down = layer.mlp.forward, layer.mlp.down_proj.weight
        kept = torch.zeros(down.shape[1], dtype=torch.bool)
        kept[down.norm(dim=0).topk(down.shape[1] // 16).indices] = True

        def forward(x, own=own, mlp=layer.mlp, kept=kept, taken=taken):
            whole = own(x)
            if taken == "S":
                acts = mlp.act_fn(mlp.gate_proj(x[:, -1])) * mlp.up_proj(x[:, -1])
                whole[:, -1] = mlp.down_proj(acts * kept)
            return whole

        layer.mlp.forward = forward
    return float(-net(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)[following])


def by_hand(label: list[int]) -> tuple[list[list[float]], list[str]]:
    """Lowest loss by the most large networks, and the best route, of every token but the last."""
    bounds, best = [], []
    for place in range(len(label) - 1):
        ids, following = PROMPT + label[:place + 1], label[place + 1]
        losses = {"".join(route): loss(route, ids, following) for route in product("BS", repeat=LAYERS)}
        bounds.append([min(value for route, value in losses.items() if route.count("B") <= most)
                       for most in range(LAYERS + 1)])
        best.append(min(losses, key=lambda route: (losses[route], route.count("B"), route)))
    return bounds, best


class LooksOneTokenTooFar(ORACLE):
    """Measures the loss of the token itself, not of the one that follows."""

    def _shown(self, lm, token, routes, logp, following):
        return super()._shown(lm, token, routes, logp, token)


def found(cls):
    model = deep(num_hidden_layers=LAYERS)
    decoder = cls(text=TEXT)
    (policy,) = decoder.toggles()
    lane, events = run(Assembly(decoder, compute_policy=policy), {"target": model}, PROMPT, 8)
    bounds = [data["values"] for data in figures(events, "lowest loss of the next token, in nats")]
    picture = figures(events, "large networks of the best route")[-1]["values"]
    best = ["".join("B" if taken else "S" for taken in column) for column in zip(*picture)]
    return lane, bounds, best


def agrees(cls) -> bool:
    lane, bounds, best = found(cls)
    label = lane.spell(TEXT)
    expected, routes = by_hand(label)
    close = all(torch.allclose(torch.tensor(a), torch.tensor(b), atol=1e-4) for a, b in zip(bounds, expected))
    return lane.main.written == label and close and best == routes and len(bounds) == len(expected)


@pytest.mark.oracle("duo_oracle")
def test_its_losses_are_those_of_every_route_in_a_forward_of_its_own():
    assert agrees(ORACLE)


@pytest.mark.refuses("duo_oracle")
def test_the_loss_of_another_token_is_refused():
    assert not agrees(LooksOneTokenTooFar)


def test_more_large_networks_never_raise_the_lowest_loss():
    _, bounds, _ = found(ORACLE)
    assert bounds and all(values == sorted(values, reverse=True) for values in bounds)


@pytest.mark.parametrize("lane, message", [
    (LaneConfig("duo_oracle", {"text": " "}), "examines a given text"),
    (LaneConfig("duo_oracle", {}, [("temperature", {})]), "does not work with a sampler"),
    (LaneConfig("duo_oracle", {}, [("ffn_skip", {})]), "does not work with a compute policy"),
])
def test_it_needs_a_text_and_decides_alone(lane, message):
    with pytest.raises(Refusal, match=message):
        assemble(lane)


def test_models_with_too_many_layers_are_refused():
    with pytest.raises(Refusal, match="at most 12 layers"):
        run(LaneConfig("duo_oracle"), {"target": deep(num_hidden_layers=13)}, PROMPT, 4)
