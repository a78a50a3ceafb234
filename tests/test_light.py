"""Few rows of a tiny network give the library's rows the light way as well, whatever the plan, the tree and the cache;
all others are left to the lean way.
"""
from __future__ import annotations

import pytest
import torch
from architectures import tiny
from toys import byte_tokenizer

from playground import load
from playground.engine.forward_input import ForwardInput
from playground.engine.fused_llama import MODEL_TYPES, build_fused_llama
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.engine.numpy_llama import MAX_ROWS, MAX_WEIGHTS, build_numpy_llama

TEXT = [5, 9, 2, 7, 7, 1, 40, 3]
ENTERING = torch.linspace(-1, 1, MAX_ROWS * 32).view(MAX_ROWS, 32)
PLANS = {
    "all layers": LayerPlan(),
    "one is skipped": LayerPlan(skip=frozenset([1])),
    "left after two": LayerPlan(stop=2, capture=frozenset([1, 2])),
    "entered late": LayerPlan(resume=(1, ENTERING)),
}
TREES = {"a chain": list(range(-1, MAX_ROWS - 1)), "siblings": [-1, -1, 0, 1][:MAX_ROWS]}


class Ways:
    """A model asked both ways for rows behind one text."""

    def __init__(self, kind: str):
        self.model = Model(tiny(kind, dtype=torch.float32), byte_tokenizer(), kind)
        self.light = self.model.numpy

    def rows(
        self, parents: list[int], plan: LayerPlan, light: bool, last: bool = False
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        self.model.numpy = self.light if light else None
        store = self.model.new_store()
        self.model.forward([ForwardInput(store, TEXT, list(range(-1, len(TEXT) - 1)))])
        store.keep(len(TEXT) - 1)
        (found,), captured = self.model.forward([ForwardInput(store, TEXT[:len(parents)], parents, last)], plan)
        return found, captured


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() < 1e-5 * expected.abs().max())


@pytest.fixture(scope="module", params=MODEL_TYPES)
def ways(request) -> Ways:
    return Ways(request.param)


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_both_ways_give_the_same_rows(ways, plan, parents):
    assert ways.light is not None
    (ours, kept), (theirs, expected) = (ways.rows(parents, plan, light) for light in (True, False))
    assert len(ours) == MAX_ROWS and close(ours, theirs)
    assert kept.keys() == expected.keys() and all(close(kept[layer], expected[layer]) for layer in kept)


def test_of_rows_of_which_one_is_wanted_it_gives_that_one(ways):
    whole, _ = ways.rows(TREES["a chain"], LayerPlan(), light=True)
    last, _ = ways.rows(TREES["a chain"], LayerPlan(), light=True, last=True)
    assert close(last, whole[-1:])


def test_a_row_that_blends_two_tokens_is_the_same_both_ways(ways):
    found = []
    for light in (ways.light, None):
        ways.model.numpy = light
        work = ForwardInput(ways.model.new_store(), TEXT[:2], [-1, 0], blends={1: ([4, 9], [0.25, 0.75])})
        found.append(ways.model.forward([work])[0][0])
    assert close(*found) and not close(found[0], ways.rows([-1, 0], LayerPlan(), light=True)[0])


@pytest.mark.parametrize("rows, taken", [(1, True), (MAX_ROWS, True), (MAX_ROWS + 1, False)])
def test_only_few_rows_go_this_way(ways, monkeypatch, rows, taken):
    asked = []
    monkeypatch.setattr(
        ways.model,
        "numpy",
        lambda positions, *rest, **inputs: asked.append(positions.shape[1]) or ways.light(positions, *rest, **inputs),
    )
    ways.model.forward([ForwardInput(ways.model.new_store(), TEXT[:rows], list(range(-1, rows - 1)))])
    assert asked == ([rows] if taken else [])


def test_a_gate_far_below_zero_lets_nothing_through_and_warns_nobody(recwarn):
    network = tiny("llama", dtype=torch.float32)
    network.model.layers[0].mlp.gate_proj.weight.data *= 1e4
    model = Model(network, byte_tokenizer(), "steep")
    (found,), _ = model.forward([ForwardInput(model.new_store(), TEXT[:1], [-1])])
    model.numpy = None
    (expected,), _ = model.forward([ForwardInput(model.new_store(), TEXT[:1], [-1])])
    assert close(found, expected) and not recwarn.list


def test_a_network_that_is_not_tiny_or_not_of_single_precision_has_no_light_way():
    single, double = (build_fused_llama(tiny("llama", dtype=dtype), 64) for dtype in (torch.float32, torch.float64))
    assert build_numpy_llama(single) and build_numpy_llama(double) is None and build_numpy_llama(None) is None
    single.weights = MAX_WEIGHTS + 1
    assert build_numpy_llama(single) is None


def test_of_the_bundled_models_the_drafts_go_this_way():
    models = load("pocket", "pocket-draft")
    assert models.draft.numpy is not None and models.target.numpy is None
