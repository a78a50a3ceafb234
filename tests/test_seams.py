"""The plan of a forward: layers skipped, left early, entered late, and what is taken out between them."""
from __future__ import annotations

import pytest
import torch
from architectures import tiny
from toys import byte_tokenizer

from playground.engine.model import Model, Work
from playground.engine.seams import Plan
from playground.errors import Refusal

PROMPT = [5, 9, 2, 7, 7, 1]
EXACT = 1e-9


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2", "gpt_neox", "gemma2"])
def model(request) -> Model:
    return Model(tiny(request.param), byte_tokenizer(), request.param)


def rows(model: Model, plan: Plan | None = None) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    (logits,), captured = model.forward([Work(model.new_store(), PROMPT, list(range(-1, len(PROMPT) - 1)))], plan)
    return logits, captured


def test_stopping_early_equals_a_model_without_its_last_layers(model):
    stopped, _ = rows(model, Plan(stop=2))
    skipped, _ = rows(model, Plan(skip=frozenset({2})))
    assert (stopped - skipped).abs().max() < EXACT
    assert (stopped - rows(model)[0]).abs().max() > 1e-3


def test_resuming_from_captured_hidden_states_equals_running_through(model):
    whole, captured = rows(model, Plan(capture=frozenset({2})))
    resumed, _ = rows(model, Plan(resume=(2, captured[2])))
    assert (whole - resumed).abs().max() < EXACT


def test_an_early_exit_can_be_finished_later_in_the_same_store():
    model = Model(tiny("llama"), byte_tokenizer(), "llama")
    store, parents = model.new_store(), list(range(-1, len(PROMPT) - 1))
    (_,), captured = model.forward([Work(store, PROMPT, parents)], Plan(stop=2, capture=frozenset({2})))
    store.forget()
    (late,), _ = model.forward([Work(store, PROMPT, parents)], Plan(resume=(2, captured[2])))
    assert (late - rows(model)[0]).abs().max() < EXACT


def test_skipping_every_layer_leaves_the_embedding(model):
    bare, captured = rows(model, Plan(skip=frozenset(range(3)), capture=frozenset({0, 1})))
    assert (captured[0] - captured[1]).abs().max() == 0
    assert (bare - rows(model, Plan(stop=0))[0]).abs().max() < EXACT


def test_a_plan_leaves_nothing_behind(model):
    before, _ = rows(model)
    rows(model, Plan(stop=1))
    assert (rows(model)[0] - before).abs().max() == 0


def test_a_model_whose_attention_would_change_is_refused():
    with pytest.raises(Refusal, match="choose another model"):
        Model(tiny("stablelm"), byte_tokenizer(), "stablelm")
