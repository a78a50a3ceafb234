"""Context-aware decoding, with fixed and adaptive strength, compared with an independent computation."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pairs import network, pair
from registry import Collapse
from runs import CONTEXT, QUESTION, alone, divergence, figures, random_rows, recorded, rows, run, same, series, written
from tables import TableModel
from torch import Tensor

from playground.contract import make
from playground.contract.lane_config import LaneConfig
from playground.decoding.prompt import Prompt
from playground.engine.forward_input import ForwardInput
from playground.engine.sampling import contrast, jensen_shannon
from playground.events import Note

GREEDY, MODEL = LaneConfig("greedy"), LaneConfig("greedy", {}, [("temperature", {"t": 1.0})])
LN2 = math.log(2)
Reads = Callable[[list[int]], Tensor]  # log-probabilities [V] after a text
COLLAPSES = {
    "cad": [
        Collapse(alone("cad", alpha=0.0), GREEDY),
        Collapse(LaneConfig("greedy", {}, [("cad", {"alpha": 0.0}), ("temperature", {"t": 1.0})]), MODEL),
    ],
    "adacad": [
        Collapse(alone("adacad", floor=1.0), alone("cad", alpha=1.0)),
        Collapse(alone("adacad", floor=0.7), alone("cad", alpha=0.7)),
        Collapse(alone("adacad", floor=1.0, base="2"), alone("cad", alpha=1.0)),
    ],
}


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


def test_adacads_alpha_is_the_divergence_of_each_row_in_the_chosen_base_with_a_floor():
    z = {"target": random_rows(6), "without_context": random_rows(7)}
    nats = jensen_shannon(*z.values())
    for knobs, alpha in [({}, nats), ({"base": "2"}, nats / LN2), ({"floor": 0.5}, nats.clamp(min=0.5))]:
        expected = torch.stack([(1 + a) * one - a * two for a, one, two in zip(alpha, *z.values())])
        assert torch.allclose(make("adacad", **knobs).mix(z), expected)


# --- whole texts: both streams are recomputed from the beginning for every token ---

CONTEXTUAL = {"cad": {"alpha": 0.8}, "adacad": {}}
ARCHITECTURES = ("llama", "gemma2", "gpt_neox", "qwen3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_alpha_minus_one_is_greedy_without_the_context_and_zero_is_greedy_with_it(architecture):
    given = Prompt(QUESTION, context=CONTEXT)
    without, with_context = (recorded(GREEDY, prompt, architecture)[0] for prompt in (Prompt(QUESTION), given))
    assert without != with_context
    assert recorded(alone("cad", alpha=-1.0), given, architecture)[0] == without
    assert recorded(alone("cad", alpha=0.0), given, architecture)[0] == with_context


def mixed_text(reads: Reads, prompts: tuple[list[int], list[int]], length: int, alpha: Callable) -> list[int]:
    new = []
    for _ in range(length):
        z1, z2 = (reads(prompt + new) for prompt in prompts)
        strength = alpha(z1, z2)
        new.append(int(((1 + strength) * z1 - strength * z2).argmax()))
    return new


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


def jsd(z1: Tensor, z2: Tensor) -> float:
    return float(jensen_shannon(z1, z2))


FAULTS: dict[str, Callable[[Reads, list[int], list[int]], list[int]]] = {
    "swapped streams": lambda reads, a, b: mixed_text(reads, (b, a), 12, jsd),
    "the distance, which is the root of the divergence": lambda reads, a, b: mixed_text(
        reads, (a, b), 12, lambda z1, z2: jsd(z1, z2) ** 0.5
    ),
    "the contrast the other way round": lambda reads, a, b: mixed_text(reads, (a, b), 12, lambda z1, z2: -jsd(z1, z2)),
    "a second stream that never hears what was written": lambda reads, a, b: mixed_text(
        lambda text: reads(b) if text[: len(a)] != a else reads(text), (a, b), 12, jsd
    ),
}


@pytest.mark.refuses("adacad")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_faulty_contrast_changes_the_text(fault):
    differ = []
    for seed in range(6):
        model = TableModel("abcde", seed=seed)
        found = written(alone("adacad"), {"target": model}, [0, 1, 2, 3], 12, other=[3])
        assert found == mixed_text(lambda text, model=model: model.scores(tuple(text)), ([0, 1, 2, 3], [3]), 12, jsd)
        differ.append(found != fault(lambda text, model=model: model.scores(tuple(text)), [0, 1, 2, 3], [3]))
    assert sum(differ) >= 3


def test_identical_streams_give_the_greedy_text_and_zero_divergence():
    for name in CONTEXTUAL:
        model = TableModel("abcde", seed=1)
        lane, events = run(alone(name, **CONTEXTUAL[name]), {"target": model}, [0, 1], 12, other=[0, 1])
        assert lane.main.written == written(GREEDY, {"target": model}, [0, 1], 12)
        assert series(events, "context against memory", "divergence, nats") == [0.0] * 12
        assert not [event for event in events if isinstance(event, Note)]


def test_a_context_overrides_memory_and_the_reader_is_informed():
    def rule(context):  # memory says b; the context, an a at the beginning, makes c nearly as likely
        return torch.tensor([-9.0, 2.0, 1.6] if context[0] == 0 else [-9.0, 3.0, -4.0], dtype=torch.float64)

    model = TableModel("abc", rule=rule)
    assert run(GREEDY, {"target": model}, [0, 1], 2)[0].text == "bb"
    lane, events = run(alone("adacad"), {"target": model}, [0, 1], 2, other=[1])
    assert lane.text == "cc"
    assert len([event for event in events if isinstance(event, Note)]) == 2
    chances = figures(events, "probability of the chosen token")[1]
    assert (
        chances["x"] == 1
        and chances["series"]["adjusted"] > 0.5 > chances["series"]["with context"] > chances["series"]["without"]
    )
    assert not figures(events, "where context and memory disagree")  # both streams put b first


def test_positions_with_different_argmaxes_are_marked():
    model = TableModel("abcde", seed=3)
    lane, events = run(alone("cad", alpha=0.0), {"target": model}, [0, 1, 2], 12, other=[2])
    marked = [data["spans"][0][0] for data in figures(events, "where context and memory disagree")]
    first = [
        [int(model.scores((*prompt, *lane.main.written[:place])).argmax()) for prompt in ([0, 1, 2], [2])]
        for place in range(12)
    ]
    assert marked == [place for place, (one, two) in enumerate(first) if one != two] and 0 < len(marked) < 12


def test_a_lane_that_needs_a_context_is_refused_without_one():
    for name in CONTEXTUAL:
        (event,) = recorded(alone(name), Prompt(QUESTION))[1]
        assert "enter a passage as context" in event.message
