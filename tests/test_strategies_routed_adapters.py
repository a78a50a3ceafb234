"""Routed adapters: what each matrix adds is a weighted sum over adapters, and the router alone decides the weights."""
from __future__ import annotations

import json

import pytest
import torch
from registry import Collapse
from runs import figures, run

import playground
from playground.algorithms.adaptive_compute import adapter_training
from playground.algorithms.adaptive_compute.adapter_experts import MATRICES
from playground.contract import find, make
from playground.contract.lane_config import LaneConfig
from playground.decoding import fitted_weights
from playground.errors import Refusal
from playground.events import Note
from playground.questions.answer_forms import FORMS, in_new_form
from playground.questions.world import score
from playground.questions.world.show import items
from playground.training.calibration import CalibrationTexts, new_answers
from support.compute_runs import PROMPT, deep, deep_network, policy_lane
from support.policy_fits import finished, fitted_lane, greedy_text
from support.routed_adapters import LAYERS, NAMES, RANK, SHAPES, WIDTH, experts_at_random

PHATGOOSE, ARROW, MERGED = map(find, ("phatgoose", "arrow", "merged_adapters"))
COLLAPSES = {
    name: [Collapse(policy_lane(name, decoder), LaneConfig(decoder)) for decoder in ("greedy", "sample")]
    for name in ("phatgoose", "arrow", "merged_adapters")
}


# --- against peft ---

@pytest.mark.parametrize("cls", [PHATGOOSE, ARROW, MERGED])
def test_one_expert_is_the_adapter_itself_as_peft_computes_it(cls, monkeypatch):
    peft = pytest.importorskip("peft")
    weights, network = experts_at_random(), deep_network()
    adapted = peft.get_peft_model(network, peft.LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules=[f"{name}_proj" for name in MATRICES]))
    for layer, block in enumerate(network.model.layers):
        for name in MATRICES:
            own = getattr(block.mlp, f"{name}_proj")
            for table, part in ((own.lora_A, "a"), (own.lora_B, "b")):
                table["default"].weight.data = weights[f"lists.{name}.{part}"][layer]
    lane, _ = fitted_lane(cls(only="lists"), weights, monkeypatch, 10)
    assert lane.tokens == greedy_text(adapted, 10) != greedy_text(deep_network(), 10)


# --- what must not matter, and what must ---

def one_policy(cls, weights: dict | None = None, **knobs):
    policy = cls(**knobs)
    policy.begin(deep().parts, weights or experts_at_random())
    return policy


def test_phatgoose_ignores_size_and_offset_of_inputs_and_gates_and_arrow_does_not():
    rows, weights = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2)), experts_at_random()
    scaled = {name: own * 7 if name.endswith("gate.gate") else own for name, own in weights.items()}
    plain = one_policy(PHATGOOSE, weights).weigh(0, "gate", rows)
    assert torch.allclose(one_policy(PHATGOOSE, scaled).weigh(0, "gate", 30 * rows + 4), plain, atol=1e-4)
    arrow = one_policy(ARROW, weights)
    assert not torch.allclose(arrow.weigh(0, "gate", 3 * rows), arrow.weigh(0, "gate", rows), atol=1e-2)
    assert torch.allclose(arrow.weigh(0, "gate", -rows), arrow.weigh(0, "gate", rows))


def test_untrained_gates_mix_evenly_and_equal_scores_take_the_first():
    weights = {name: own * 0 if name.endswith(".gate") else own for name, own in experts_at_random().items()}
    rows = torch.randn(4, WIDTH)
    assert torch.allclose(one_policy(PHATGOOSE, weights, k=3).weigh(0, "up", rows), torch.full((4, 3), 1 / 3))
    assert one_policy(PHATGOOSE, weights, k=1).weigh(0, "up", rows).tolist() == [[1.0, 0.0, 0.0]] * 4


def test_a_small_temperature_takes_the_best_alone():
    rows = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
    for cls in (PHATGOOSE, ARROW):
        sharp = one_policy(cls, k=3, temperature=0.01).weigh(2, "gate", 30 * rows)
        assert torch.equal(sharp.argmax(1), one_policy(cls, k=3).weigh(2, "gate", 30 * rows).argmax(1))
        assert float(sharp.max(1).values.min()) > 0.9


def test_tokens_along_the_direction_of_an_expert_go_to_it():
    weights = experts_at_random()
    for at, name in enumerate(NAMES):
        weights[f"{name}.gate.a"] = torch.zeros(LAYERS, RANK, WIDTH)
        weights[f"{name}.gate.a"][:, 0, at] = 1
        weights[f"{name}.gate.gate"] = torch.nn.functional.one_hot(torch.tensor([at] * LAYERS), WIDTH).float()
    rows = 9 * torch.eye(WIDTH)[:3]
    for cls in (PHATGOOSE, ARROW):
        assert one_policy(cls, weights, k=1).weigh(3, "gate", rows).tolist() == torch.eye(3).tolist()


def test_an_adapter_of_zeros_thins_out_the_others():
    weights = experts_at_random() | {f"facts.{matrix}.b": torch.zeros(LAYERS, SHAPES[matrix][0], RANK)
                                     for matrix in MATRICES}
    rows = torch.randn(3, WIDTH, dtype=torch.double)
    own = one_policy(MERGED, weights, only="lists, sums").adapters[0]["gate"].added(rows, torch.full((3, 2), 1 / 2))
    thinned = one_policy(MERGED, weights).adapters[0]["gate"].added(rows, torch.full((3, 3), 1 / 3))
    assert torch.allclose(thinned, own * 2 / 3)


# --- what a lane shows ---

def test_a_lane_shows_which_expert_answered_which_token(monkeypatch):
    _, events = fitted_lane(PHATGOOSE(), experts_at_random(), monkeypatch, 5)
    curve = figures(events, "weight of each expert, over all layers")
    assert [data["x"] for data in curve] == list(range(5))
    assert all(sum(data["series"].values()) == pytest.approx(1, abs=1e-3) for data in curve)
    spans = [data["spans"][0] for data in figures(events, "expert with the largest weight")]
    assert [(span[0], span[1]) for span in spans] == [(at, at + 1) for at in range(5)]
    assert all(span[3] == pytest.approx(data["series"][span[2]], abs=1e-3) == max(data["series"].values())
               for span, data in zip(spans, curve))
    table = figures(events, "weights of the experts for the newest token")[-1]
    assert table["columns"] == list(NAMES) and len(table["rows"]) == LAYERS


def test_without_experts_it_says_how_to_train_some_and_an_unknown_one_is_refused(monkeypatch):
    _, events = run(policy_lane("arrow"), {"target": deep()}, PROMPT, 3)
    assert "fit arrow" in next(event.text for event in events if isinstance(event, Note))
    with pytest.raises(Refusal, match="choose some of facts, lists, sums"):
        fitted_lane(ARROW(only="poems"), experts_at_random(), monkeypatch, 2)


# --- the answers that adapters are trained on, and the training ---

def test_answers_in_a_new_form_say_the_same():
    for task in FORMS:
        for item in items(task, 8, 2):
            new = in_new_form(item)
            assert new.answer != item.answer and new.prompt == item.prompt
            if task == "records":
                fields = dict(line.split(" = ", 1) for line in new.answer.split("\n"))
                assert {name: json.loads(value) for name, value in fields.items()} == json.loads(item.answer)
            elif task == "lists":
                assert ", ".join(line.removeprefix("- ") for line in new.answer.split("\n")) == item.answer
            elif task == "programs":
                assert score(item, new.answer.removeprefix("```python\n").removesuffix("\n```")) == 1.0
            else:
                assert item.answer.split("\n")[-1].removeprefix("#### ") in new.answer


def test_only_the_answer_and_its_end_are_learned_from():
    model = playground.load("pocket", draft=None).target
    texts = CalibrationTexts(model, [], 0).in_new_form("lists")
    batch = next(texts.held_out())
    ids, learned = batch.ids[0], batch.real[0].nonzero()[:, 0]
    answer = model.tokens.decode(ids[learned].tolist())
    assert answer.lstrip().startswith("- ") and int(ids[learned[-1]]) in model.end_ids
    assert learned.tolist() == list(range(int(learned[0]), int(learned[-1]) + 1)) and int(learned[0]) > 5
    assert all(asked < len(ids) for asked, ids in new_answers(model, "programs", 6, 0))


@pytest.mark.slow
def test_training_leaves_the_model_alone_and_lowers_the_loss(monkeypatch):
    monkeypatch.setattr(adapter_training, "ADAPTER_STEPS", 20)
    monkeypatch.setattr(adapter_training, "GATE_STEPS", 4)
    monkeypatch.setattr("playground.training.calibration.NEW_ANSWERS", 24)
    model = playground.load("pocket", draft=None).target
    before = [weight.clone() for weight in model.network.parameters()]
    torch.manual_seed(0)
    weights, seen = finished(adapter_training.train_experts(CalibrationTexts(model, [], 0), ("facts",)))
    assert all(map(torch.equal, before, model.network.parameters()))
    assert set(weights) == {f"facts.{name}.{part}" for name in MATRICES for part in ("a", "b", "gate")}
    assert float(weights["facts.gate.gate"].abs().max()) > 0
    said = [event.text for event in seen if isinstance(event, Note)]
    losses = [float(word) for word in said[0].split() if word[0].isdigit()]
    assert losses[1] < 0.8 * losses[0]


def test_an_untrained_gate_lets_half_of_the_input_through():
    parts = deep().parts
    adapter = adapter_training.TaskAdapter(parts, RANK)
    for own in adapter.b.values():
        own.data.normal_()
    gated = adapter_training.AdaptedLayers(parts, adapter, adapter_training.AdapterGates(adapter))
    plain, rows = adapter_training.AdaptedLayers(parts, adapter), torch.randn(1, 4, WIDTH)
    base = rows @ gated._matrices[0]["gate"].T
    assert torch.allclose(gated._product(0, "gate", rows) - base, (plain._product(0, "gate", rows) - base) / 2,
                          atol=1e-4)


@pytest.mark.slow
def test_the_bundled_experts_answer_in_their_forms_and_routing_beats_averaging():
    model = playground.load("pocket", draft=None).target
    weights = fitted_weights.stored("phatgoose", {"target": model})
    texts = CalibrationTexts(model, [], 1)  # other questions than those of the training

    def loss(task, name, **knobs):
        return adapter_training._routed_loss(texts.in_new_form(task), make(name, **knobs), weights)

    losses = {name: sum(loss(task, name) for task in FORMS) for name in adapter_training.ROUTERS}
    own = sum(loss(task, "merged_adapters", only=task) for task in FORMS)
    assert own < losses["phatgoose"] < losses["merged_adapters"]
