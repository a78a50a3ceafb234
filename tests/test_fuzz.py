"""Traces and their exports: any text is read or refused with a sentence."""
from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from playground.errors import Refusal
from playground.events import Candidate, Commit, Done, Header, Stamped, Step
from playground.player.frames import recording, trace_of
from playground.player.standalone import to_html
from playground.trace import Trace, check
from playground.trace.csv_export import COLUMNS, FORMULA, NUMBER, to_csv
from playground.trace.lane_metrics import metrics
from playground.trace.transcript import sequences
from support.fuzzing import changed, damaged, folder, fuzz, texts  # noqa: F401
from support.traces import everything

ROOT = Path(__file__).parents[1]
MANY = 1000  # examples of each property in the long run


# --- traces ---

@cache
def sound() -> dict[str, Any]:
    """A trace of two lanes with every kind of event, as `to_json` gives it."""
    return everything().to_json()


def reading(trace: Trace) -> None:
    """Everything done with an uploaded trace: it is checked, and one without contradictions can be measured and
    exported.
    """
    wrong = check(trace)
    assert all(isinstance(sentence, str) for sentence in wrong)
    for header in trace.headers:
        sequences(trace.lane(header.lane).events)
    if not wrong:
        for header in trace.headers:
            metrics(trace.lane(header.lane))
    exported(trace)


def exported(trace: Trace) -> None:
    """The CSV can be parsed and holds no formula; the page holds the whole trace and ends no script early."""
    rows = list(csv.reader(io.StringIO(to_csv(trace), newline=""), strict=True))
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert not [cell for row in rows for cell in row if FORMULA.match(cell) and not NUMBER.fullmatch(cell)]
    page = to_html(trace)
    (page + to_csv(trace)).encode("utf-8")
    assert page.lower().count("</script") == empty_page().lower().count("</script")
    assert page.lower().count("<script") == empty_page().lower().count("<script")


@cache
def empty_page() -> str:
    return to_html(Trace([Header()]))


def numbered(field: str, value: float) -> dict[str, Any]:
    """A sound trace in which one number of an event is another."""
    document = sound()
    event = next(event for event in document["events"] if event.get(field))
    event[field] = [value] * len(event[field]) if isinstance(event[field], list) else value
    return document


@fuzz
@given(changed(sound()))
@example(numbered("logprobs", 1000.0))
@example(numbered("entropy", 1e308))
@example({**sound(), "events": None})
@example({**sound(), "events": 5})
@example([])
@example("")
@example(None)
def test_a_trace_with_parts_replaced_is_read_or_refused(document: Any):
    try:
        trace = Trace.from_json(document)
    except Refusal:
        return
    reading(trace)


@fuzz
@given(changed({"headers": sound()["lanes"], "events": sound()["events"]}))
def test_headers_and_events_of_a_frame_are_read_or_refused(document: Any):
    assume(isinstance(document, dict) and {"headers", "events"} <= document.keys())
    try:
        trace = trace_of(document["headers"], document["events"])
    except Refusal:
        return
    json.dumps(recording([asdict(header) for header in trace.headers], [stamped.to_json() for stamped in trace.events]))


@fuzz
@given(damaged("\n".join(json.dumps(line) for line in ({**sound(), "events": []}, *sound()["events"]))))
def test_a_damaged_trace_file_is_read_or_refused(folder: Path, raw: bytes):
    path = folder / "run.jsonl"
    path.write_bytes(raw)
    try:
        trace = Trace.load(path)
    except Refusal:
        return
    reading(trace)
    trace.save(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"lane":0,"seq":0,"at":0.0,"kind":"note","text":"a","text":"b"}',
        '{"lane":0,"lane":9,"seq":0,"at":0.0,"kind":"note"}',
    ],
)
def test_a_duplicate_key_is_refused(tmp_path: Path, line: str):
    path = tmp_path / "run.jsonl"
    path.write_text('{"format":"decoding-playground-trace","version":1,"lanes":[{"lane":0}]}\n' + line + "\n")
    with pytest.raises(Refusal, match="twice"):
        Trace.load(path)


def as_json_carries_it(trace: Trace) -> Trace:
    """In JSON the two halves of a surrogate pair are one character, even from neighbouring pieces."""
    return Trace.from_json(json.loads(json.dumps(trace.to_json())))


@fuzz
@given(st.lists(st.tuples(texts, st.none() | st.floats(-800, 0)), min_size=1, max_size=5), texts, texts)
def test_a_run_with_any_texts_is_exported(tokens: list[tuple[str, float | None]], strategy: str, prompt: str):
    pieces, logprobs = [piece for piece, _ in tokens], [logprob for _, logprob in tokens]
    step = Step(0, 1.0, 1.0, 0, [Candidate(0, pieces[0], 1.0, 1.0, pieces[0])])
    commit = Commit(0, [*range(len(tokens))], pieces, "".join(pieces), logprobs, ["sampled"] * len(tokens))
    events = [Stamped(0, seq, 0.0, event) for seq, event in enumerate([step, commit, Done("end")])]
    trace = Trace([Header(0, strategy, strategy, prompt=prompt, stop=[prompt])], events)
    exported(trace)
    shown = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', to_html(trace), re.DOTALL)
    assert shown is None or Trace.from_json(json.loads(shown[1])) == as_json_carries_it(trace)


# --- the long run ---

@pytest.mark.long
def test_every_property_holds_for_a_thousand_examples():
    files = sorted(map(str, Path(__file__).parent.glob("test_fuzz*.py")))
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not long", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"FUZZ_EXAMPLES": str(MANY)},
        timeout=3600,
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
