"""Adaptive computation modules: gates choose how many learners run, and the learners add up to the network."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from runs import figures, run
from torch.nn.functional import silu

from playground.contract import find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal
from playground.events import Note
from playground.training.calibration import CalibrationTexts, calibrate
from playground.training.fitting import Fitting
from support.compute_runs import PROMPT, deep, deep_network, policy_lane
from support.policy_fits import finished, fitted_lane, greedy_text, training_texts

ACM = find("acm")
COLLAPSES = {
    "acm": [
        Collapse(policy_lane("acm"), LaneConfig("greedy")),
        Collapse(policy_lane("acm", mode="fixed"), LaneConfig("greedy")),
        Collapse(policy_lane("acm", "sample", mode="by_layer"), LaneConfig("sample")),
    ],
}
LAYERS, WIDTH, CHANNELS, LEARNERS = 6, 32, 48, 4


def random_weights() -> dict[str, torch.Tensor]:
    """Gates and learners at random, so that every number of learners occurs."""
    chance = torch.Generator().manual_seed(2)
    order = torch.stack([torch.randperm(CHANNELS, generator=chance) for _ in range(LAYERS)]).to(torch.int16)
    shapes = {"0.weight": (16, WIDTH), "0.bias": (16,), "2.weight": (16, 16), "2.bias": (16,),
              "4.weight": (5, 16), "4.bias": (5,)}
    gates = {f"0.4.{name}": torch.randn(LAYERS, *shape, generator=chance) for name, shape in shapes.items()}
    return {"order": order, "down": torch.randn(LAYERS, WIDTH, CHANNELS, generator=chance) * 0.3, **gates}


def chosen(weights: dict, layer: int, x: torch.Tensor) -> torch.Tensor:
    """The number of learners of each row: three linear layers with SiLU between them, and the largest score."""
    for place in (0, 2, 4):
        x = x @ weights[f"0.4.{place}.weight"][layer].T + weights[f"0.4.{place}.bias"][layer]
        x = silu(x) if place < 4 else x
    return x.argmax(-1)


def dense_network(weights: dict, counts=chosen):
    """The library's network, whose FFNs compute every prefix of the learners and then select one for each token."""
    network = deep_network()
    for number, layer in enumerate(network.model.layers):
        order = weights["order"][number].long()
        gate, up = layer.mlp.gate_proj.weight.detach()[order], layer.mlp.up_proj.weight.detach()[order]
        down = weights["down"][number].double()

        def forward(x, gate=gate, up=up, down=down, number=number):
            rows = x.reshape(-1, WIDTH)
            acts = silu(rows @ gate.T) * (rows @ up.T)
            outputs = [acts[:, :size] @ down[:, :size].T for size in range(0, CHANNELS + 1, CHANNELS // LEARNERS)]
            picked = counts(weights, number, rows.float())
            return torch.stack([outputs[count][row] for row, count in enumerate(picked.tolist())]).reshape(x.shape)

        layer.mlp.forward = forward
    return network


class NeverAppliesTheHighest(ACM):
    """The loop as released: it ends before the highest learner that was chosen."""

    def learners(self, layer, hidden):
        return [max(0, count - 1) for count in super().learners(layer, hidden)]


class GatesBeforeTheNorm(ACM):
    """The gates read the hidden states, not their norm."""

    def begin(self, parts, weights):
        super().begin(parts, weights)
        self._gates._norm = lambda layer, hidden: hidden


def agrees(cls, monkeypatch) -> bool:
    weights = random_weights()
    lane, _ = fitted_lane(cls(), weights, monkeypatch)
    return lane.tokens == greedy_text(dense_network(weights))


@pytest.mark.oracle("acm")
def test_the_text_is_that_of_a_network_that_computes_everything_and_selects(monkeypatch):
    weights = random_weights()
    _, events = fitted_lane(ACM(), weights, monkeypatch)
    shown = {count for data in figures(events, "learners that ran in each layer") for count in data["values"]}
    assert agrees(ACM, monkeypatch) and {0, LEARNERS} < shown, "tokens with all learners and with none occur"


@pytest.mark.refuses("acm")
@pytest.mark.parametrize("cls", [NeverAppliesTheHighest, GatesBeforeTheNorm])
def test_that_network_refuses_a_loop_that_ends_too_early_and_gates_of_other_states(cls, monkeypatch):
    assert not agrees(cls, monkeypatch)


@pytest.mark.parametrize("bias, count", [(20.0, LEARNERS), (-20.0, 0)])
def test_a_large_bias_forces_all_learners_or_none(bias, count, monkeypatch):
    weights = random_weights()
    lane, _ = fitted_lane(ACM(bias=bias), {name: each * (0.1 if name[:4] == "0.4." else 1)
                                           for name, each in weights.items()}, monkeypatch)
    expected = dense_network(weights, lambda weights, layer, x: torch.full((len(x),), count))
    assert lane.tokens == greedy_text(expected)


def test_fixed_counts_run_the_channels_with_the_largest_output_weights_first():
    lane, _ = run(policy_lane("acm", mode="by_layer", counts="4 1 0 2 3 4"), {"target": deep()}, PROMPT, 10)
    network = deep_network()
    with torch.no_grad():
        for layer, count in zip(network.model.layers, (4, 1, 0, 2, 3, 4)):
            down = layer.mlp.down_proj.weight
            down[:, down.norm(dim=0).argsort(descending=True, stable=True)[count * CHANNELS // LEARNERS:]] = 0
    assert lane.tokens == greedy_text(network, 10)


def test_what_the_gates_cost_is_counted(monkeypatch):
    weights = random_weights()
    _, events = fitted_lane(ACM(bias=20.0), {name: each * (0.01 if name[:4] == "0.4." else 1)
                                             for name, each in weights.items()}, monkeypatch)
    share = figures(events, "share of the layers' weights that ran")[-1]["series"]["share"]
    attention = WIDTH * (WIDTH + 32) + WIDTH * WIDTH
    gates, whole = WIDTH * 16 + 16 * 16 + 16 * 5, attention + 3 * WIDTH * CHANNELS
    assert share == pytest.approx((whole + gates) / whole, abs=1e-4)


def test_labels_are_the_first_number_after_which_one_more_learner_helps_little():
    enough = ACM.calibrate.__func__.__globals__["train_modules"].__globals__["enough"]
    chance = torch.Generator().manual_seed(0)
    errors = torch.rand(5, 200, generator=chance).cumsum(0).flip(0)
    by_hand = [next((k for k in range(4) if column[k] < 1.2 * column[k + 1]), 4) for column in errors.T.tolist()]
    assert enough(errors).tolist() == by_hand and set(by_hand) == {0, 1, 2, 3, 4}


def test_training_brings_every_number_of_learners_closer_and_repeats(tmp_path, monkeypatch):
    globals_ = ACM.calibrate.__func__.__globals__["train_modules"].__globals__
    monkeypatch.setitem(globals_, "BUDGETS", (0.4,))
    fits, notes = [], []
    for _ in range(2):
        events = ACM.calibrate(CalibrationTexts(deep(), training_texts(), 0), 0)
        weights, seen = finished(events)
        fits.append(weights)
        notes.append([event.text for event in seen if isinstance(event, Note)])
    assert all(torch.equal(fits[0][name], fits[1][name]) for name in fits[0])
    errors = [float(word) for word in notes[0][0].split(": ")[1].split()]
    assert errors == sorted(errors, reverse=True) and errors[0] == 1.0
    assert fits[0]["down"].shape == (LAYERS, WIDTH, CHANNELS) and math.isfinite(float(fits[0]["0.4.4.bias"].sum()))


def test_an_interrupted_training_ends_as_an_uninterrupted_one(tmp_path, monkeypatch):
    globals_ = ACM.calibrate.__func__.__globals__["train_modules"].__globals__
    monkeypatch.setitem(globals_, "BUDGETS", (0.4,))
    monkeypatch.setattr("playground.training.calibration.world_texts", lambda model, seed, *which: training_texts())
    model, place = deep(), tmp_path / "acm.training"
    whole = calibrate(ACM, Fitting(model, place))

    def stop(event):
        if isinstance(event, Note):  # after the learners
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(ACM, Fitting(model, place, watch=stop))
    assert list(tmp_path.iterdir()) == [tmp_path / "acm.learners.training"]
    resumed = calibrate(ACM, Fitting(model, place))
    assert all(torch.allclose(whole[name].float(), resumed[name].float(), atol=1e-3) for name in whole)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("knobs, message", [
    ({"mode": "by_layer", "counts": "4 4"}, "The model has 6 layers, not 2"),
    ({"mode": "by_layer", "counts": "9 x"}, "A layer has 0 to 4 learners"),
])
def test_counts_that_do_not_fit_are_refused(knobs, message):
    with pytest.raises(Refusal, match=message):
        run(policy_lane("acm", **knobs), {"target": deep()}, PROMPT, 4)


def test_without_a_fit_it_says_that_every_learner_runs():
    _, events = run(Assembly(make("greedy"), compute_policy=ACM()), {"target": deep()}, PROMPT, 4)
    assert [event.text for event in events if isinstance(event, Note)][0].startswith("No gates for this model")
