"""Samplers, plain decoders and entropy adaptive decoding, against numbers worked out by hand."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse, lanes, title
from tables import TableModel, write

from playground.draws import Draws
from playground.events import Figure, Switch
from playground.lane import Lane, Limits
from playground.recipe import Recipe, assemble
from playground.recorder import Silent
from playground.session import Runner

GREEDY, MODEL = Recipe("greedy"), Recipe("greedy", {}, [("temperature", {"t": 1.0})])


def alone(name: str, **knobs) -> Recipe:
    return Recipe("greedy", {}, [(name, knobs)])


def ead(**knobs) -> Recipe:
    return Recipe("ead", knobs)


AT_REST = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
COLLAPSES = {
    "sample": [Collapse(Recipe("sample", AT_REST), MODEL), Collapse(Recipe("sample", {"temperature": 0.0}), GREEDY),
               Collapse(Recipe("sample", {"top_k": 1}), GREEDY), Collapse(Recipe("sample", {"top_p": 0.0}), GREEDY),
               Collapse(Recipe("sample", {"min_p": 1.0}), GREEDY)],
    "temperature": [Collapse(alone("temperature", t=0.0), GREEDY), Collapse(MODEL, Recipe("sample", AT_REST))],
    "top_k": [Collapse(alone("top_k", k=1), GREEDY), Collapse(alone("top_k", k=0), MODEL)],
    "top_p": [Collapse(alone("top_p", p=0.0), GREEDY), Collapse(alone("top_p", p=1.0), MODEL)],
    "min_p": [Collapse(alone("min_p", m=1.0), GREEDY), Collapse(alone("min_p", m=0.0), MODEL)],
    "repetition_penalty": [Collapse(alone("repetition_penalty", penalty=1.0), GREEDY)],
    "ead": [Collapse(ead(threshold=8.0, start="small", dwell=0), GREEDY, on="draft"),
            Collapse(ead(threshold=-1.0, start="large", dwell=0), GREEDY),
            Collapse(ead(dwell=64, start="large"), GREEDY), Collapse(ead(dwell=64, start="small"), GREEDY, on="draft")]
    + [Collapse(ead(threshold=t, window=w, dwell=d, start=s), GREEDY, twins=True) for t, w, d, s in
       [(1.5, 1, 0, "large"), (1.5, 1, 0, "small"), (1.8, 3, 2, "large"), (6.0, 1, 0, "small"), (6.2, 5, 1, "large")]],
}


@pytest.mark.parametrize("recipe", lanes("greedy_identical") + [alone("top_p", p=0.0), alone("temperature", t=0.0)], ids=title)
def test_of_two_tokens_that_tie_the_lower_id_is_written(recipe):
    undecided = TableModel("abc", rule=lambda context: torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    lane = write(assemble(recipe), {"target": undecided, "draft": undecided}, [0, 1, 2], Limits(max_new_tokens=8), Draws(0))
    assert lane.text == "b" * 8


# --- entropy adaptive decoding ---

BITS = [1, 1, 1, 9, 9, 9, 1, 1, 1]
LETTERS = "".join(chr(0x100 + i) for i in range(1024))


def of_entropy(bits: float) -> torch.Tensor:
    """Scores whose softmax is uniform over 2 ** bits tokens."""
    return torch.full((len(LETTERS),), -math.inf, dtype=torch.float64).index_fill(0, torch.arange(2 ** bits), 0.0)


def switched(bits: list[int], **knobs) -> tuple[list[float], list[tuple[int, str]]]:
    """Rolling means and switches of a run over rows of these entropies, whichever model writes."""
    model = TableModel(LETTERS, rule=lambda context: of_entropy(bits[len(context) - 1]))
    assembly = assemble(ead(**knobs))
    lane = Lane([0], {"target": model, "draft": model}, assembly, Limits(max_new_tokens=len(bits)), Silent(model.tokens))
    runner, events = Runner(lane, assembly), []
    while not runner.finished:
        events += runner.advance()
    means = [event.data["series"]["mean entropy, bits"] for event in events if isinstance(event, Figure)]
    return means, [(event.position, event.to) for event in events if isinstance(event, Switch)]


def test_the_large_model_writes_while_the_rolling_mean_is_above_the_threshold():
    means, switches = switched(BITS, window=3, threshold=4.0, dwell=0, start="small")
    assert means == pytest.approx([1, 1, 1, 11 / 3, 19 / 3, 9, 19 / 3, 11 / 3, 1])
    assert switches == [(0, "small"), (5, "large"), (8, "small")]  # tokens 5, 6 and 7 are the large model's


def test_a_mean_that_equals_the_threshold_counts_as_sure():
    assert switched([4, 4, 4], window=1, threshold=4.0, dwell=0, start="large")[1] == [(0, "large"), (1, "small")]


@pytest.mark.parametrize("dwell", [0, 1, 2, 3, 5])
def test_no_two_switches_are_closer_than_the_dwell(dwell):
    _, switches = switched([9, 1] * 12, window=1, threshold=4.0, dwell=dwell, start="large")
    places = [position for position, _ in switches]
    assert len(places) > 3 and all(b - a >= dwell for a, b in zip(places, places[1:]))


def test_temperature_changes_the_tokens_but_not_what_ead_thinks_of_a_row():
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}

    def first_mean(extras):
        assembly = assemble(Recipe("ead", {"start": "large"}, extras))
        runner = Runner(Lane([0, 1], models, assembly, Limits(max_new_tokens=3), Silent(models["target"].tokens)), assembly)
        events = [event for _ in range(4) for event in runner.advance()]
        return next(event.data for event in events if isinstance(event, Figure))

    assert first_mean([]) == first_mean([("temperature", {"t": 0.3})]) == first_mean([("top_k", {"k": 2})])


def test_a_model_that_takes_over_reads_all_that_the_other_wrote():
    models = {"target": TableModel("abcde", seed=3), "draft": TableModel("abcde", seed=4)}
    lane = write(assemble(ead(threshold=1.8, window=1, dwell=0)), models, [0, 1, 2], Limits(max_new_tokens=24), Draws(0))
    for stream in (lane.target, lane.stream("draft")):
        read = stream.store.keys[0].rows[0, :stream.store.length, 0].tolist()
        assert len(read) > 8 and read == lane.tokens[:len(read)]
