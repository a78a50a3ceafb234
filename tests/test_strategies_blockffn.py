"""BlockFFN: experts are off exactly where the router's ReLU is zero, and only those that are on are computed."""
from __future__ import annotations

import math

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

BLOCKFFN = find("blockffn")
COLLAPSES = {
    "blockffn": [
        Collapse(policy_lane("blockffn"), LaneConfig("greedy")),
        Collapse(policy_lane("blockffn", "sample", theta=0.5), LaneConfig("sample")),
    ],
}
LAYERS, WIDTH, EXPERTS, SIZE = 6, 32, 8, 6
ROUTING = BLOCKFFN.explain.__globals__
TRAINING = ROUTING["train_blocks"].__globals__


def weights_at_random(seed: int = 3) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    orders = torch.stack([torch.randperm(EXPERTS * SIZE, generator=chance) for _ in range(LAYERS)])
    return {"order": orders.to(torch.int16), "router": torch.randn(LAYERS, EXPERTS, WIDTH, generator=chance),
            "norm": torch.rand(LAYERS, EXPERTS, generator=chance) + 0.5}


def factors(x: torch.Tensor, router: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The sheet's router, expert by expert, in plain Python."""
    rows = []
    for state in x.tolist():
        scores = [max(0.0, sum(a * b for a, b in zip(state, weights))) for weights in router.tolist()]
        scale = math.sqrt(sum(score * score for score in scores) / len(scores) + 1e-6)
        rows.append([weight * score / scale for weight, score in zip(norm.tolist(), scores)])
    return torch.tensor(rows, dtype=torch.float64)


def dense_network(weights: dict):
    """The library's network, whose FFNs compute every expert and multiply it by its factor."""
    network = deep_network()
    for number, layer in enumerate(network.model.layers):
        order = weights["order"][number].long()
        gate, up = (getattr(layer.mlp, name).weight.detach()[order] for name in ("gate_proj", "up_proj"))
        down = layer.mlp.down_proj.weight.detach()[:, order]

        def forward(x, gate=gate, up=up, down=down, number=number):
            shares = factors(x[0].float(), weights["router"][number], weights["norm"][number])
            acts = silu(x[0] @ gate.T) * (x[0] @ up.T)
            total = sum(shares[:, j, None] * (acts[:, j * SIZE:(j + 1) * SIZE] @ down[:, j * SIZE:(j + 1) * SIZE].T)
                        for j in range(EXPERTS))
            return total[None]

        layer.mlp.forward = forward
    return network


class TopTwo(BLOCKFFN):
    """Keeps the two largest factors, as other mixtures do."""

    def gates(self, layer, hidden):
        found = super().gates(layer, hidden)
        return found.masked_fill(found < found.topk(2, -1).values[:, -1:], 0.0)


class NormalisesBySum(BLOCKFFN):
    """Divides the factors by their sum instead of their root mean square."""

    def gates(self, layer, hidden):
        found = super().gates(layer, hidden)
        return found / found.sum(-1, keepdim=True)


def agrees(cls, monkeypatch, **knobs) -> bool:
    weights = weights_at_random()
    lane, _ = fitted_lane(cls(**knobs), weights, monkeypatch, 8)
    return lane.tokens == greedy_text(dense_network(weights), 8)


@pytest.mark.oracle("blockffn")
@pytest.mark.parametrize("skip", [True, False])
def test_the_text_is_that_of_a_network_that_computes_every_expert(skip, monkeypatch):
    assert agrees(BLOCKFFN, monkeypatch, skip=skip)


@pytest.mark.refuses("blockffn")
@pytest.mark.parametrize("cls", [TopTwo, NormalisesBySum])
def test_that_network_refuses_other_routers(cls, monkeypatch):
    assert not agrees(cls, monkeypatch)


def test_experts_that_are_off_are_not_computed_and_a_router_that_is_off_adds_nothing(monkeypatch):
    flops = {}
    for name, scale, skip in (("skipping", 1.0, True), ("all", 1.0, False), ("none", 0.0, True)):
        weights = weights_at_random()
        weights["router"] = weights["router"] * scale
        lane, events = fitted_lane(BLOCKFFN(skip=skip), weights, monkeypatch, 8)
        flops[name] = sum(event.flops for event in events if isinstance(event, Forward))
    assert flops["none"] < flops["skipping"] < flops["all"]
    network = deep_network()
    for layer in network.model.layers:
        layer.mlp.down_proj.weight.data.zero_()
    assert lane.tokens == greedy_text(network, 8)


def test_a_prompt_is_computed_in_chunks_and_drafts_together():
    class Halves(BLOCKFFN):
        """Even positions use the first expert, odd ones the second."""

        def gates(self, layer, hidden):
            return torch.eye(EXPERTS)[torch.arange(len(hidden)) % 2]

    policy = Halves()
    policy.layers = [ROUTING["BlockLayer"](deep().parts.ffn_projections(0), torch.arange(48), EXPERTS)]
    choices = policy.choices(list(range(30)), 20)
    runs = choices.feed_forwards(0, torch.zeros(30, WIDTH), None)
    assert [len(run.rows) for run in runs] == [8, 8, 4, 10] and runs[-1].rows == list(range(20, 30))
    assert {run.part.weights for run in runs} == {runs[0].part.weights} and runs[0].part.experts.tolist() == [0, 1]


def test_the_factors_do_not_depend_on_the_scale_of_the_scores():
    gates, chance = ROUTING["gates"], torch.Generator().manual_seed(0)
    x, router = torch.randn(5, WIDTH, generator=chance), torch.randn(EXPERTS, WIDTH, generator=chance)
    found, norm = gates(x, router, torch.ones(EXPERTS)), torch.ones(EXPERTS)
    assert torch.allclose(found, gates(x, 7 * router, norm), atol=1e-4)
    assert torch.allclose(found.double(), factors(x, router, norm), atol=1e-4)
    assert bool((found >= 0).all()) and bool((found == 0).any())


def test_a_large_theta_leaves_out_every_expert_of_small_factors(monkeypatch):
    weights = weights_at_random()
    weights["norm"] = weights["norm"] * 1e-3
    lane, events = fitted_lane(BLOCKFFN(theta=1.0), weights, monkeypatch, 4)
    used = figures(events, "share of the experts that a token used")
    assert {value for data in used for value in data["values"]} == {0.0}


def test_sparsity_of_chunks_by_hand():
    chunk, active = ROUTING["chunk_sparsity"], torch.rand(11, 5, generator=torch.Generator().manual_seed(1)) < 0.3
    for size in (1, 2, 4):
        shares = [1 - len({j for row in active[start:start + size].tolist() for j, on in enumerate(row) if on}) / 5
                  for start in range(0, 11 // size * size, size)]
        assert float(chunk(active, size)) == pytest.approx(sum(shares) / len(shares))


def test_the_chunk_loss_counts_the_experts_that_a_chunk_uses():
    loss, real = TRAINING["chunk_loss"], torch.ones(1, 4, dtype=torch.bool)
    same, different = torch.eye(8)[[2, 2, 2, 2]][None], torch.eye(8)[[0, 1, 2, 3]][None]
    assert float(loss(same, real, 4)) == pytest.approx(1 / 8, abs=1e-2)
    assert float(loss(different, real, 4)) == pytest.approx(4 / 8, abs=1e-2)


@pytest.mark.slow
def test_the_chunk_loss_makes_the_experts_of_chunks_sparser(monkeypatch):
    monkeypatch.setattr("playground.training.calibration.BATCH", 60)
    off = []
    for weight in (0.0, 30.0):
        monkeypatch.setitem(TRAINING, "CHUNKS", weight)
        weights, seen = finished(BLOCKFFN.calibrate(CalibrationTexts(deep(), training_texts(20), 0), 0))
        text = [event.text for event in seen if isinstance(event, Note)][-1]
        off.append(float(text.split("for a token, ")[1].split()[0]))
    assert off[1] > off[0]
    assert sorted(weights["order"][0].tolist()) == list(range(48)) and weights["router"].shape == (LAYERS, 12, WIDTH)


def test_without_a_fit_everything_runs_and_it_says_so():
    _, events = run(policy_lane("blockffn"), {"target": deep()}, PROMPT, 4)
    assert next(event.text for event in events if isinstance(event, Note)).startswith("No routers for this model")
