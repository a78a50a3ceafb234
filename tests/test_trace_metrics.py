"""Differences between lanes, and their metrics."""
from __future__ import annotations

import json
import math

import pytest

from playground.events import Candidate, Rollback, Step
from playground.trace import diff, metrics
from support.metric_table import TABLE
from support.small_traces import END, ONE
from support.traces import commit, everything, greedy, speculative, trace

# --- differences ---

def test_equal_texts_have_no_difference():
    assert diff(greedy(1, 2, 3), greedy(1, 2, 3)) is None


def test_how_a_text_was_reached_makes_no_difference():
    assert diff(speculative(), greedy(10, 11, 12, 20, 22, 23)) is None


def test_the_first_difference_comes_with_its_margin_in_logits():
    row = Step(1, top=[Candidate(2, " 2", 0.4, 1.0), Candidate(9, " 9", 0.1, 0.0)])
    found = diff(trace(ONE, row, commit(1, [2]), END), trace(ONE, commit(1, [9]), END))
    assert (found.index, found.a.id, found.b.id, found.b.piece) == (1, 2, 9, " 9")
    assert found.margin == pytest.approx(math.log(0.4 / 0.1)) and not found.prefix
    assert found.sentence() == "Token 1 is ' 2' in the first text and ' 9' in the second; their logits differ by 1.39."


def test_the_margin_may_come_from_the_other_lane():
    row = Step(0, top=[Candidate(1, " 1", 0.2, 0.0), Candidate(2, " 2", 0.4, 1.0)])
    assert diff(greedy(1), trace(row, commit(0, [2]), END)).margin == pytest.approx(math.log(0.2 / 0.4))


def test_without_a_row_that_shows_both_there_is_no_margin():
    found = diff(greedy(1, 2), greedy(1, 3))
    assert found.margin is None and "no step lists both" in found.sentence()


def test_a_row_that_was_taken_back_gives_no_margin():
    row = Step(1, top=[Candidate(2, " 2", 0.5, 1.0), Candidate(3, " 3", 0.5, 1.0)])
    assert diff(trace(ONE, row, commit(1, [4]), Rollback(1, " 1"), commit(1, [2]), END), greedy(1, 3)).margin is None


def test_a_shorter_text_that_agrees_says_why_it_ends():
    found = diff(greedy(1, 2, 3), greedy(1, 2))
    assert found.prefix and (found.index, found.a.id, found.b) == (2, 3, None)
    assert found.sentence() == "The first 2 tokens are the same; then the second text ends at its length limit."
    assert (
        diff(greedy(1, end="end"), greedy(1, 2)).sentence()
        == "The first 1 tokens are the same; then the first text ends."
    )


# --- metrics ---

@pytest.mark.parametrize("measured, expected", TABLE.values(), ids=TABLE)
def test_a_metric_has_the_value_of_the_table(measured, expected):
    found = metrics(measured)
    assert {name: found[name] for name in expected} == expected and json.loads(json.dumps(found)) == found


def test_only_the_metrics_of_the_table_have_no_meaning_without_events():
    measured, expected = TABLE["a metric without meaning is null"]
    assert {name for name, value in metrics(measured).items() if value is None} == expected.keys()


def test_metrics_describe_one_lane():
    with pytest.raises(ValueError, match="one lane"):
        metrics(everything())
