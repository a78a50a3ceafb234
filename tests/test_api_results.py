"""Scores, and results made from traces alone."""
from __future__ import annotations

import json
import re
import sys
from html import unescape

import pandas
import pytest

import playground
from playground.contract.lane_config import LaneConfig
from playground.events import Branches, Commit, Done, Failed, Header, Stamped
from playground.player.standalone import to_html
from playground.trace import Trace
from playground.trace.csv_export import COLUMNS
from playground.trace.result import Result
from support.api_models import PROMPT, models, saved  # noqa: F401


def trace(*events, stop=()) -> Trace:
    return Trace(
        [Header(strategy="some", stop=list(stop))], [Stamped(0, seq, 0.0, event) for seq, event in enumerate(events)]
    )


def test_a_result_is_plain_data_and_the_same_as_text():
    result = Result(trace(Commit(ids=[1], pieces=["a"]), Done("length")))
    assert json.loads(result.to_json()) == json.loads(json.dumps(result.to_dict()))
    assert result.to_dict()["token_ids"] == [1]


# --- score ---

def test_a_text_is_scored_by_the_target_and_its_draft(models):
    readings = playground.score(PROMPT, models=models)
    assert [reading.header.model for reading in readings] == [models.target.name, models.draft.name]
    ids = models.target.tokens.encode(PROMPT)
    for reading in readings:
        assert reading.token_ids == ids[-len(reading.token_ids):] and len(reading.logprobs) == len(reading.token_ids)
        assert all(logprob < 0 for logprob in reading.logprobs)


def test_logprobs_are_the_models_own_for_any_strategy(models):
    drawn = playground.run(
        "sample", PROMPT, models=models, knobs={"temperature": 0.5, "top_k": 3}, seed=1, max_new_tokens=6
    )
    given = playground.compare([LaneConfig("greedy", forced=drawn.token_ids)], PROMPT, models=models, max_new_tokens=6)[
        0
    ]
    assert given.token_ids == drawn.token_ids and given.logprobs == pytest.approx(drawn.logprobs, abs=1e-4)


def test_a_single_token_cannot_be_scored(models):
    with pytest.raises(playground.Refusal, match="single token"):
        playground.score("T", models=models)


# --- results are made from traces alone ---

def test_the_repr_of_a_result_is_one_line(models):
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=40)
    assert repr(result).startswith("<Result of greedy: 40 tokens, length, ") and len(repr(result)) < 150
    assert "\n" not in repr(playground.Result(trace(Commit(0, [5], ["a\nb"], "a\nb"), Done("end"))))
    assert "Try again." in repr(playground.Result(trace(Failed("Try again."))))


def test_a_result_is_saved_as_the_page_that_plays_it(models, tmp_path):
    result = playground.run("greedy", PROMPT, models=models, max_new_tokens=3)
    assert result.to_html(tmp_path / "r.html") is None
    assert (tmp_path / "r.html").read_text() == result.to_html() == to_html(result.trace)
    for place in (tmp_path, tmp_path / "none" / "r.html", 3.5):
        with pytest.raises(playground.Refusal, match="cannot be written"):
            result.to_html(place)


def test_a_notebook_shows_a_result_in_a_sandboxed_frame():
    shown = playground.Result(trace(Commit(0, [5], ['"></iframe><b>'], '"></iframe><b>'), Done("end")))
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" sandbox="([^"]*)"[^<>]*></iframe>', shown._repr_html_())
    assert unescape(frame[1]) == shown.to_html() and frame[2].split() == ["allow-scripts", "allow-downloads"]


def test_a_data_frame_has_a_row_per_token(models):
    result = playground.run("sample", PROMPT, models=models, max_new_tokens=5)
    table = result.to_dataframe()
    assert list(table.columns) == list(COLUMNS) and list(table["id"]) == result.token_ids
    assert list(table["logprob"]) == pytest.approx(result.logprobs) and table["entropy"].dtype == float
    assert playground.Result(trace(Done("end"))).to_dataframe().empty


def test_unrecorded_values_are_missing_in_a_data_frame():
    row, = playground.Result(trace(Commit(0, [5], ["a"], "a"), Done("end"))).to_dataframe().to_dict("records")
    assert row["text"] == "a" and all(pandas.isna(row[name]) for name in ("entropy", "logprob", "rank"))


def test_a_data_frame_without_pandas_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(playground.Refusal, match="needs pandas"):
        playground.Result(trace(Done("end"))).to_dataframe()


def test_a_result_survives_its_traces_file(models, tmp_path):
    result = playground.run("speculative", PROMPT, models=models, max_new_tokens=8)
    result.trace.save(tmp_path / "t.jsonl")
    again = Result(Trace.load(tmp_path / "t.jsonl")).to_dict()
    for measured in ("seconds", "tokens_per_second", "time_to_first_token"):  # a file keeps microseconds
        assert again["metrics"].pop(measured) == pytest.approx(result.metrics[measured], abs=1e-2, rel=1e-2)
    assert again == {**result.to_dict(), "metrics": {name: result.metrics[name] for name in again["metrics"]}}


def test_several_texts_are_ordered_best_first_without_dropped_ones():
    result = Result(
        trace(
            Commit(0, [5], ["a"], "a"),
            Branches([(1, 0), (2, 0)]),
            Commit(1, [6], ["b"], "b", sequence=1),
            Commit(1, [7], ["c"], "c", sequence=2),
            Branches([], [2], {0: -2.0, 1: -1.0, 2: -3.0}),
            Done("end"),
        )
    )
    assert result.outputs == [("ab", [5, 6]), ("a", [5])]


def test_text_is_cut_before_the_first_of_several_stop_strings():
    result = Result(trace(Commit(0, [5], ["a. b!"], "a. b!"), Done("stop_string"), stop=["!", "."]))
    assert result.text == "a" and result.token_ids == [5]


@pytest.mark.parametrize("events, reason, message, begun", [
    ([Done("end")], "end", "", True),
    ([Commit(0, [5], ["a"], "a"), Failed("Try again.")], "failed", "Try again.", True),
    ([Failed("Try again.")], "failed", "Try again.", False),
    ([Commit(0, [5], ["a"], "a")], "stopped", "", True),
])
def test_the_last_event_says_why_it_ended(events, reason, message, begun):
    result = Result(trace(*events))
    assert (result.reason, result.message, result.begun) == (reason, message, begun)
