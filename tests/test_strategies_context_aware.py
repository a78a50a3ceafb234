"""Context-aware decoding, with fixed and adaptive strength, compared with an independent computation."""
from __future__ import annotations

import math

import pytest
import torch
from pairs import network, pair
from runs import QUESTION, alone, divergence, random_rows, recorded, rows, run, same, series, written
from tables import TableModel

from playground.contract.lane_config import LaneConfig
from playground.decoding.prompt import Prompt
from playground.engine.forward_input import ForwardInput
from playground.engine.sampling import contrast, jensen_shannon
from playground.events import Note
from support.contrasting import LN2, mixed_text

GREEDY = LaneConfig("greedy")


# --- CAD and AdaCAD: rows by hand ---

def test_worked_example_of_the_contrast():
    assert contrast(rows(2, 1, 0), rows(0, 2.4, 0), 1.0)[0].tolist() == pytest.approx([4, -0.4, 0])
    assert torch.equal(contrast(random_rows(0), random_rows(1), -1.0), random_rows(1))


def test_a_huge_alpha_ranks_by_the_difference_alone():
    z1, z2 = random_rows(0), random_rows(1)
    assert torch.equal(contrast(z1, z2, 1e6).argmax(-1), (z1 - z2).argmax(-1))


def test_the_divergence_equals_its_definition():
    z1, z2 = random_rows(2), random_rows(3)
    expected = [divergence(p, q) for p, q in zip(z1.softmax(-1).tolist(), z2.softmax(-1).tolist())]
    assert same(jensen_shannon(z1, z2).tolist(), expected, 1e-12)
    closed = 0.5 * (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * math.log(2))  # of (1, 0) and (1/2, 1/2)
    assert float(jensen_shannon(rows(0, -math.inf), rows(0, 0))) == pytest.approx(closed)


def test_the_divergence_is_symmetric_within_zero_and_ln_2_and_invariant_to_shifts():
    z1, z2 = random_rows(4), random_rows(5)
    found = jensen_shannon(z1, z2)
    assert torch.allclose(found, jensen_shannon(z2, z1)) and torch.allclose(found, jensen_shannon(z1 + 7, z2 - 3))
    assert bool((found > 0).all()) and bool((found < LN2).all())
    assert bool((jensen_shannon(z1, z1) == 0).all())
    assert float(jensen_shannon(rows(200, 0, 0), rows(0, 200, 0))) == pytest.approx(LN2)


# --- whole texts: both streams are recomputed from the beginning for every token ---

CONTEXTUAL = {"cad": {"alpha": 0.8}, "adacad": {}}


@pytest.mark.oracle("cad", "adacad")
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("name", CONTEXTUAL)
def test_both_streams_equal_the_librarys_forwards_over_the_whole_text(name, architecture):
    library, model = network(architecture), pair(architecture).target
    prompts = [54, 71, 9, 9, 80, 71], [80, 71]
    strength = {
        "cad": lambda z1, z2: 0.8,
        "adacad": lambda z1, z2: divergence(z1.softmax(-1).tolist(), z2.softmax(-1).tolist()),
    }[name]
    with torch.inference_mode():
        expected = mixed_text(
            lambda text: library(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1], prompts, 10, strength
        )
    lane, _ = run(alone(name, **CONTEXTUAL[name]), {"target": model}, prompts[0], 10, other=prompts[1])
    assert lane.main.written == expected
    for stream, prompt in zip((lane.target, lane.stream("without_context")), prompts):
        text = (prompt + expected)[:stream.store.length]
        fresh = model.new_store()
        model.forward([ForwardInput(fresh, text, list(range(-1, len(text) - 1)))])
        assert len(text) == len(prompt) + 9
        assert all(
            (held.rows[:, : len(text)] - new.rows[:, : len(text)]).abs().max() < 1e-9
            for held, new in zip(stream.store.keys, fresh.keys)
        )


def test_identical_streams_give_the_greedy_text_and_zero_divergence():
    for name in CONTEXTUAL:
        model = TableModel("abcde", seed=1)
        lane, events = run(alone(name, **CONTEXTUAL[name]), {"target": model}, [0, 1], 12, other=[0, 1])
        assert lane.main.written == written(GREEDY, {"target": model}, [0, 1], 12)
        assert series(events, "context against memory", "divergence, nats") == [0.0] * 12
        assert not [event for event in events if isinstance(event, Note)]


def test_a_lane_that_needs_a_context_is_refused_without_one():
    for name in CONTEXTUAL:
        (event,) = recorded(alone(name), Prompt(QUESTION))[1]
        assert "enter a passage as context" in event.message
