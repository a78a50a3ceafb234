"""Entropy adaptive decoding."""
from __future__ import annotations

import math
from collections import deque

import pytest
import torch
from tables import TableModel, write
from toys import byte_tokenizer, sentencepiece_tokenizer

from playground.contract import make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.decoding.rng import Draws
from playground.engine.loading.load import check_draft
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal
from playground.events import Figure, Switch
from support.sampled_texts import ead

BITS = [1, 1, 1, 9, 9, 9, 1, 1, 1]
LETTERS = "".join(chr(0x100 + i) for i in range(1024))


def of_entropy(bits: float) -> torch.Tensor:
    """Scores whose softmax is uniform over 2 ** bits tokens."""
    return torch.full((len(LETTERS),), -math.inf, dtype=torch.float64).index_fill(0, torch.arange(2 ** bits), 0.0)


def switched(bits: list[int], **knobs) -> tuple[list[float], list[tuple[int, str]]]:
    """Rolling means and switches of a run over rows of these entropies, whichever model writes."""
    model = TableModel(LETTERS, rule=lambda context: of_entropy(bits[len(context) - 1]))
    assembly = assemble(ead(**knobs))
    lane = Lane(
        [0], {"target": model, "draft": model}, assembly, Limits(max_new_tokens=len(bits)), Silent(model.tokens)
    )
    runner, events = Runner(lane, assembly), []
    while not runner.finished:
        events += runner.advance()
    means = [
        event.data["series"]["mean entropy, bits"]
        for event in events
        if isinstance(event, Figure) and event.name == "mean entropy"
    ]
    return means, [(event.position, event.to) for event in events if isinstance(event, Switch)]


def test_the_large_model_writes_while_the_rolling_mean_is_above_the_threshold():
    means, switches = switched(BITS, window=3, threshold=4.0, dwell=0, start="small")
    assert means == pytest.approx([1, 1, 1, 11 / 3, 19 / 3, 9, 19 / 3, 11 / 3, 1])
    assert switches == [(0, "small"), (5, "large"), (8, "small")]  # tokens 5, 6 and 7 are the large model's


def computed(bits: list[int], window: int, threshold: float, dwell: int, fault: str = "") -> list[tuple[int, str]]:
    """The switches of a run that starts small, by the rule; with a fault, by another."""
    active, since, found = "small", 0, [(0, "small")]
    for place in range(len(bits)):
        recent = bits[max(0, place + 1 - window):place + 1]
        mean = {
            "the largest": max(recent),
            "the last": recent[-1],
            "a sum": sum(recent),
            "nats": sum(recent) / len(recent) * math.log(2),
        }.get(fault, sum(recent) / (window if fault == "divided by the whole window" else len(recent)))
        since += 1
        wanted = "large" if (mean >= threshold if fault == "equal is unsure" else mean > threshold) else "small"
        if wanted != active and (since >= dwell or fault == "no dwell"):
            active, since = wanted, 0
            found.append((place + 1, active))
    return [switch for switch in found if switch[0] < len(bits)]


COURSES = [
    ([1, 1, 1, 9, 9, 9, 1, 1, 1], 3, 4.0, 0),
    ([4, 4, 4, 5, 4, 4, 3, 3], 2, 4.0, 2),
    ([9, 1] * 6, 1, 4.0, 3),
    ([9, 9, 2, 2, 5, 5, 5, 1], 4, 5.0, 1),
]
FAULTS = ["the largest", "the last", "a sum", "nats", "divided by the whole window", "equal is unsure", "no dwell"]


def switches_of(course: tuple) -> list[tuple[int, str]]:
    bits, window, threshold, dwell = course
    return switched(bits, window=window, threshold=threshold, dwell=dwell, start="small")[1]


@pytest.mark.oracle("ead")
def test_the_switches_are_those_of_the_rule():
    assert [switches_of(course) for course in COURSES] == [computed(*course) for course in COURSES]


@pytest.mark.refuses("ead")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_rule_switches_at_other_positions(fault):
    assert any(switches_of(course) != computed(*course, fault) for course in COURSES)


@pytest.mark.refuses("ead")
@pytest.mark.parametrize(
    "part, wrong",
    [("deque", lambda maxlen: deque(maxlen=maxlen + 1)), ("LN2", 1.0)],
    ids=["a window one too long", "nats for bits"],
)
def test_a_wrong_ead_is_refused(part, wrong, monkeypatch):
    monkeypatch.setattr(f"strategies.sampling.ead.{part}", wrong)
    with pytest.raises(AssertionError):
        test_the_switches_are_those_of_the_rule()


def test_a_mean_equal_to_the_threshold_counts_as_certain():
    assert switched([4, 4, 4], window=1, threshold=4.0, dwell=0, start="large")[1] == [(0, "large"), (1, "small")]


@pytest.mark.parametrize("dwell", [0, 1, 2, 3, 5])
def test_no_two_switches_are_closer_than_the_dwell(dwell):
    _, switches = switched([9, 1] * 12, window=1, threshold=4.0, dwell=dwell, start="large")
    places = [position for position, _ in switches]
    assert len(places) > 3 and all(b - a >= dwell for a, b in zip(places, places[1:]))


def test_the_rolling_mean_can_be_reset_at_a_switch():
    means, switches = switched(BITS, window=3, threshold=4.0, dwell=0, start="small", clear=True)
    assert means == pytest.approx([1, 1, 1, 11 / 3, 19 / 3, 9, 5, 11 / 3, 1])
    assert switches == [(0, "small"), (5, "large"), (8, "small")]


def test_it_reports_the_large_models_share_of_the_text():
    model = TableModel(LETTERS, rule=lambda context: of_entropy(BITS[len(context) - 1]))
    assembly = assemble(ead(window=3, threshold=4.0, dwell=0, start="small"))
    runner, events = (
        Runner(
            Lane([0], {"target": model, "draft": model}, assembly, Limits(max_new_tokens=9), Silent(model.tokens)),
            assembly,
        ),
        [],
    )
    while not runner.finished:
        events += runner.advance()
    shares = [
        event.data["series"]["share"]
        for event in events
        if isinstance(event, Figure) and event.name == "share of the large model"
    ]
    assert shares == pytest.approx([0, 0, 0, 0, 0, 1 / 6, 2 / 7, 3 / 8, 3 / 9])
    assert [event.why for event in events if isinstance(event, Switch)][1:] == [
        # the last of its own tokens too
        "mean entropy 6.33 bits; tokens to read first: 6", "mean entropy 3.67 bits; tokens to read first: 4"]


def test_a_pair_with_different_vocabularies_is_refused():
    with pytest.raises(Refusal, match="another vocabulary .* choose a draft of the same model family"):
        check_draft(Tokens(byte_tokenizer(), 320), Tokens(sentencepiece_tokenizer(), 320))
    assert "draft" in make("ead").needs  # which is what has a pair loaded, and so checked


def test_temperature_changes_the_tokens_but_not_eads_entropy():
    models = {"target": TableModel("abcde"), "draft": TableModel("abcde", seed=1)}

    def first_mean(extras):
        assembly = assemble(LaneConfig("ead", {"start": "large"}, extras))
        runner = Runner(
            Lane([0, 1], models, assembly, Limits(max_new_tokens=3), Silent(models["target"].tokens)), assembly
        )
        events = [event for _ in range(4) for event in runner.advance()]
        return next(event.data for event in events if isinstance(event, Figure) and event.name == "mean entropy")

    assert first_mean([]) == first_mean([("temperature", {"t": 0.3})]) == first_mean([("top_k", {"k": 2})])


def test_after_a_switch_a_model_reads_all_tokens_of_the_other():
    models = {"target": TableModel("abcde", seed=3), "draft": TableModel("abcde", seed=4)}
    lane = write(
        assemble(ead(threshold=1.8, window=1, dwell=0)), models, [0, 1, 2], Limits(max_new_tokens=24), Draws(0)
    )
    for stream in (lane.target, lane.stream("draft")):
        read = stream.store.keys[0].rows[0, :stream.store.length, 0].tolist()
        assert len(read) > 8 and read == lane.tokens[:len(read)]
