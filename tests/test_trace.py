"""A trace holds all that was seen: it survives a file, knows when it contradicts itself, and every metric is arithmetic
on it.
"""
from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from playground import events as ev
from playground.errors import Refusal
from playground.events import (
    Branches,
    Cache,
    Candidate,
    Done,
    Failed,
    Figure,
    Fill,
    Header,
    Mask,
    Note,
    Rollback,
    Stamped,
    Step,
)
from playground.trace import Trace, check, replay, schema
from support.small_traces import END, ONE
from support.traces import commit, draft, everything, greedy, speculative, stamp, trace, verdict

ROOT = Path(__file__).parents[1]


# --- the file ---

def test_a_saved_trace_is_loaded_as_it_was(tmp_path):
    everything().save(tmp_path / "run.jsonl")
    assert Trace.load(tmp_path / "run.jsonl") == everything()


def test_a_trace_survives_the_way_to_the_browser_and_back():
    assert Trace.from_json(json.loads(json.dumps(everything().to_json()))) == everything()


def test_a_file_has_a_head_and_one_event_a_line(tmp_path):
    everything().save(tmp_path / "run.jsonl")
    head, *lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert json.loads(head)["format"] == "decoding-playground-trace"
    assert [json.loads(line)["kind"] for line in lines] == [stamped.event.kind for stamped in everything().events]


def test_a_lane_taken_out_keeps_its_number():
    lane = everything().lane(1)
    assert [header.lane for header in lane.headers] == [1] and {stamped.lane for stamped in lane.events} == {1}
    assert check(lane) == []


def test_events_must_come_in_order_and_from_a_known_lane():
    one = trace(Note("a"))
    with pytest.raises(ValueError, match="must increase"):
        one.append(Stamped(0, 0, 0.0, Note("b")))
    with pytest.raises(ValueError, match="no lane 3"):
        one.append(Stamped(3, 1, 0.0, Note("b")))


HEAD = '{"format":"decoding-playground-trace","version":1,"lanes":[{"lane":0}]}\n'
NOTE = '{"lane":0,"seq":0,"at":0.0,"kind":"note","text":"hi"}\n'


@pytest.mark.parametrize(
    "content, line, reason",
    [
        ("", 1, "it is truncated"),
        ("hello\n", 1, "it is not JSON"),
        ("[1]\n", 1, "is not the header of a decoding playground trace"),
        (HEAD.replace("decoding-playground-trace", "other"), 1, "is not the header of a decoding playground trace"),
        (
            HEAD.replace('"version":1', '"version":2'),
            1,
            "format version is 2, and this playground reads versions up to 1",
        ),
        (HEAD.replace('"version":1', '"version":"1"'), 1, "'1' is not a version"),
        (HEAD.replace('[{"lane":0}]', "3"), 1, "not a list"),
        (HEAD.replace('{"lane":0}', "3"), 1, "a header is not a JSON object"),
        (HEAD.replace('{"lane":0}', '{"seed":"x"}'), 1, "seed: input should be a valid integer"),
        (HEAD.replace('{"lane":0}', '{"sead":1}'), 1, "a header has no field 'sead'"),
        (HEAD.replace('{"lane":0}', '{"lane":0},{"lane":0}'), 1, "two lanes have the same number"),
        (HEAD + "[" * 100_000 + "\n", 2, "it is not JSON"),
        (HEAD + "7\n", 2, "it is not a JSON object"),
        (HEAD + NOTE + NOTE.replace('"seq":0', '"seq":1').replace("note", "noise"), 3, "unknown event kind 'noise'"),
        (HEAD + NOTE.replace('"note"', '["note"]'), 2, "unknown event kind"),
        (HEAD + NOTE.replace('"hi"', "5"), 2, "text: input should be a valid string"),
        (HEAD + NOTE.replace("text", "test"), 2, "note has no field 'test'"),
        (HEAD + NOTE.replace('"at":0.0,', ""), 2, "at: field required"),
        (HEAD + NOTE.replace("0.0", "NaN"), 2, "it is not JSON"),
        (HEAD + NOTE.replace('"lane":0', '"lane":1'), 2, "there is no lane 1"),
        (HEAD + NOTE + NOTE, 3, "seq 0 follows seq 0"),
        (HEAD + NOTE + NOTE[:20], 3, "it is truncated"),
    ],
)
def test_a_wrong_file_is_refused_with_line_and_reason(tmp_path, content, line, reason):
    path = tmp_path / "wrong.jsonl"
    path.write_text(content)
    with pytest.raises(Refusal) as refusal:
        Trace.load(path)
    sentence = str(refusal.value)
    assert sentence.startswith(f"Line {line} of wrong.jsonl cannot be read: ") and reason in sentence
    assert sentence.endswith(".") and "\n" not in sentence


def test_a_file_that_is_not_text_or_not_there_is_refused(tmp_path):
    (tmp_path / "image.jsonl").write_bytes(b"\x89PNG\xff\xfe\n")
    for name in ("image.jsonl", "nowhere.jsonl"):
        with pytest.raises(Refusal, match=name):
            Trace.load(tmp_path / name)


def test_a_wrong_document_is_refused_with_the_event():
    document = everything().to_json()
    document["events"][3]["entropy"] = "high"
    with pytest.raises(Refusal, match="Event 3 of the trace cannot be read: entropy"):
        Trace.from_json(document)
    with pytest.raises(Refusal, match="is not the header"):
        Trace.from_json([])


def test_a_number_that_json_does_not_know_is_not_saved(tmp_path):
    with pytest.raises(Refusal, match="cannot be saved"):
        trace(Step(entropy=math.nan)).save(tmp_path / "run.jsonl")
    assert not (tmp_path / "run.jsonl").exists()


# --- any event ---

def any_of(cls):
    hints = get_type_hints(cls) | ({"data": dict[str, str | int | list[float]]} if cls is Figure else {})
    strings = {"dropped": st.lists(st.from_regex(ev.EVICTIONS, fullmatch=True))} if cls is Cache else {}
    return st.builds(cls, **{f.name: st.from_type(hints[f.name]) for f in fields(cls)} | strings)


def finite(event):
    return not any("not finite" in complaint for complaint in check(trace(event)))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, database=None)
@given(st.one_of([any_of(cls) for cls in ev.EVENTS.values()]).filter(finite))
def test_any_event_survives_json_and_fits_the_schema(event):
    line = json.loads(json.dumps(Stamped(0, 0, 0.0, event).to_json()))
    assert Trace.from_json({**trace().to_json(), "events": [line]}).events[0].event == event
    VALIDATOR.validate(line)


# --- the schema ---

VALIDATOR = jsonschema.Draft202012Validator(schema())


def test_the_stored_schema_is_the_one_the_dataclasses_give():
    stored = (ROOT / "assets" / "trace.schema.json").read_text()
    assert stored == json.dumps(schema(), indent=1) + "\n", (
        "write json.dumps(schema(), indent=1) and a newline to assets/trace.schema.json"
    )


@pytest.mark.parametrize("made", [everything, speculative, lambda: greedy(1, 2, 3)])
def test_real_traces_fit_the_schema_line_by_line_and_as_a_whole(made, tmp_path):
    made().save(tmp_path / "run.jsonl")
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        VALIDATOR.validate(json.loads(line))
    VALIDATOR.validate(json.loads(json.dumps(made().to_json())))


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "noise"},
        {"kind": "draft"},
        {"lane": -1},
        {"at": "soon"},
        {"seq": None},
        {"entropy": "high"},
        {"entropi": 1.0},
        {"top": [[1, "a"]]},
        {"top": [[1, "a", "x", 0.5, None]]},
        {"chosen": 1.5},
    ],
)
def test_corrupted_lines_do_not_fit_the_schema(change):
    line = json.loads(json.dumps(Stamped(0, 0, 0.0, Step(0, 1.0, 1.0, 3, [Candidate(3, "a", 0.5, 0.5)])).to_json()))
    assert VALIDATOR.is_valid(line) and not VALIDATOR.is_valid(line | change)


def test_corrupted_heads_do_not_fit_the_schema():
    head = json.loads(HEAD)
    assert VALIDATOR.is_valid(head)
    for change in (
        {"version": 2},
        {"format": "other"},
        {"lanes": {}},
        {"lanes": [{"seed": "x"}]},
        {"events": [{"kind": "note"}]},
    ):
        assert not VALIDATOR.is_valid(head | change)


# --- soundness ---

@pytest.mark.parametrize("made", [everything, speculative, lambda: greedy(1, 2, 3), lambda: Trace([])])
def test_a_sound_trace_has_no_complaints(made):
    assert check(made()) == []


GUESS = draft(0, [5, 6])


@pytest.mark.parametrize(
    "complaint, broken",
    {
        "clock goes back": trace(ONE, Note("x"), END, at=[0.0, 2.0, 1.0]),
        "neither ends nor fails": trace(ONE),
        "follows the end": trace(ONE, END, Note("late")),
        "follows the end ": trace(ONE, Failed("out of memory"), Done("failed")),
        "position is 3, but 1 tokens are committed": trace(ONE, commit(3, [2]), END),
        "removes 2 tokens, but 1 are committed": trace(ONE, Rollback(2), END),
        "do not spell the text ' one'": trace(commit(0, [1], text=" one"), END),
        "do not spell the text ' wrong'": trace(commit(0, [1, 2]), Rollback(1, " wrong"), END),
        "do not spell the text ' two'": trace(commit(0, [1, 2], text=" two"), Rollback(1, " 1"), END),
        "the draft of round 0 has no verdict": trace(GUESS, draft(1, [7]), verdict(1, [0], 8), commit(0, [7, 8]), END),
        "the draft of round 0 has no verdict ": trace(GUESS, END),
        "(draft): round 0 already has one": trace(GUESS, verdict(0, [], 8), commit(0, [8]), GUESS, END),
        "(verdict): round 0 already has one": trace(GUESS, verdict(0, [], 8), commit(0, [8]), verdict(0, [], 8), END),
        "round 0 has no draft before it": trace(verdict(0, [], 5), END),
        "round 0 has no draft before it ": trace(verdict(0, [], 5), GUESS, END),
        "node 2 is not in a draft of 2 nodes": trace(
            GUESS, verdict(0, [0, 1], 7, tests=[0, 1, 2]), commit(0, [5, 6, 7]), END
        ),
        "accepted nodes [1] are not a path": trace(GUESS, verdict(0, [1], 7), commit(0, [6, 7]), END),
        "accepted nodes [0, 1] are not a path": trace(
            draft(0, [5, 6], [-1, -1]), verdict(0, [0, 1], 7), commit(0, [5, 6, 7]), END
        ),
        "commits [5, 9], but the verdict accepted [5, 7]": trace(GUESS, verdict(0, [0], 7), commit(0, [5, 9]), END),
        "commits 3 tokens, but the verdict accepted 2": trace(GUESS, verdict(0, [0], 7), commit(0, [5, 7, 9]), END),
        "were not all committed": trace(
            GUESS, verdict(0, [0], 7), commit(0, [5]), draft(1, [8]), verdict(1, [], 9), commit(1, [9]), END
        ),
        "its lists have lengths [1, 1, 0, 1]": trace(commit(0, [1], logprobs=[]), END),
        "its lists have lengths [2, 2, 2, 1]": trace(replace(GUESS, q=[0.5]), verdict(0, [], 7), commit(0, [7]), END),
        "its lists have lengths [1, 1, 0, 1] ": trace(Fill([0], [1], [], [0.5]), END),
        "parent of a node does not precede it": trace(
            draft(0, [5, 6], [1, -1]), verdict(0, [], 7), commit(0, [7]), END
        ),
        "101 tokens are allowed in a vocabulary of 100": trace(Mask(0, 101, 100), END),
        "not listed for 4 layers of 2 heads": trace(Cache(length=5, layers=4, heads=2, live=[[[(0, 5)]]] * 3), END),
        "are not ascending within 5 positions": trace(Cache(length=5, layers=1, heads=1, live=[[[(0, 6)]]]), END),
        "are not ascending within 9 positions": trace(
            Cache(length=9, layers=1, heads=1, live=[[[(4, 6), (0, 2)]]]), END
        ),
        "position 2 was merged into 4, but the live ranges are": trace(
            Cache(length=5, layers=1, heads=1, live=[[[(0, 2), (3, 4)]]], evicted=2, merged=1, joined=[[[(2, 4)]]]), END
        ),
        "position 3 was merged into 0, but the live ranges are": trace(
            Cache(
                length=5,
                layers=2,
                heads=1,
                live=[[[(0, 4)]], [[(0, 2)]]],
                evicted=4,
                merged=2,
                joined=[[[(3, 0)]], [[(3, 0)]]],
            ),
            END,
        ),
        "1 merged slots are listed, 2 were counted": trace(
            Cache(length=5, layers=1, heads=1, live=[[[(0, 2)]]], evicted=3, merged=2, joined=[[[(2, 0)]]]), END
        ),
        "1.5 is not a probability": trace(Step(top=[Candidate(1, "a", 1.5, 0.5)]), END),
        "-0.5 is not a probability": trace(Step(top=[Candidate(1, "a", 0.5, -0.5)]), END),
        "2.0 is not a probability": trace(replace(GUESS, q=[2.0, 0.5]), verdict(0, [], 7), commit(0, [7]), END),
        "3.0 is not a probability": trace(
            GUESS, verdict(0, [], 7, tests=[0], leftover=[Candidate(1, "a", 0.5, 3.0)]), commit(0, [7]), END
        ),
        "4.0 is not a probability": trace(
            GUESS, replace(verdict(0, [], 7), tests=[ev.Test(0, 0.5, 0.5, 4.0, False)]), commit(0, [7]), END
        ),
        "1.1 is not a probability": trace(Mask(banned=1.1), END),
        f"{math.exp(0.5)} is not a probability": trace(commit(0, [1], logprobs=[0.5]), END),
        "not finite": trace(Step(entropy=math.nan), END),
        "not finite ": trace(Branches(scores={0: -math.inf}), END),
    }.items(),
)
def test_each_contradiction_is_found_alone(complaint, broken):
    found = check(broken)
    assert len(found) == 1 and complaint.strip() in found[0] and found[0].startswith("lane 0: ")


def test_complaints_name_lane_and_event():
    both = Trace(
        [Header(0), Header(1)], [*stamp(ONE, END), Stamped(1, 5, 0.0, commit(4, [1])), Stamped(1, 6, 0.0, END)]
    )
    assert check(both) == ["lane 1: event 5 (commit): its position is 4, but 0 tokens are committed"]


@pytest.mark.parametrize(
    "sound",
    [
        pytest.param(trace(GUESS, Done("stopped")), id="a stopped lane may leave its last draft unjudged"),
        pytest.param(trace(GUESS, Failed("out of memory")), id="so may a lane that failed"),
        pytest.param(
            trace(GUESS, verdict(0, [0, 1], 7), commit(0, [5]), END),
            id="the end of the run may cut what a verdict kept",
        ),
        pytest.param(
            trace(GUESS, verdict(0, [0], 7), commit(0, [5, 7, 9], ["draft", "redraw", "forced"]), END),
            id="a grammar may force more",
        ),
        pytest.param(
            trace(GUESS, verdict(0, [0], 7), commit(0, [5]), commit(1, [7]), END),
            id="a verdict may be committed in two parts",
        ),
        pytest.param(
            trace(GUESS, verdict(0, [0, 1], -1), commit(0, [5, 6]), END), id="a verdict may have no token of its own"
        ),
        pytest.param(
            trace(commit(0, [1, 2], pieces=["<0xC3>", "<0xBC>"], text="ü"), END), id="a letter may take two tokens"
        ),
        pytest.param(
            trace(commit(0, [1, 2], pieces=["a", "b<0xC3>"], text="ab"), END), id="a letter may stay half-finished"
        ),
        pytest.param(
            trace(commit(0, [1, 2], pieces=["a", "<|end|>"], text="a"), Done("end")), id="a special token is silent"
        ),
        pytest.param(
            trace(commit(0, [1, 2], pieces=["<s>", " a"], text="a"), END), id="a tokenizer may drop the first space"
        ),
        pytest.param(
            trace(ONE, Branches([(1, 0), (2, 0)]), commit(1, [2], sequence=1), commit(1, [3], sequence=2), END),
            id="a sequence goes on from its parent's text",
        ),
        pytest.param(trace(commit(0, [1], logprobs=[None]), END), id="a token without a row has no log-probability"),
    ],
)
def test_what_may_happen_is_not_a_contradiction(sound):
    assert check(sound) == []


@pytest.mark.parametrize(
    "pieces, text",
    [
        (["a", "<0xC3>", "b"], "aüc"),
        (["<0xC3>", "ab", "<0xBC>", "ba"], "üaba"),
        (["ab<0xC3>ba"], "aba"),
        (["a", "  b"], "a b"),
    ],
)
def test_half_letters_excuse_nothing_around_them(pieces, text):
    assert "do not spell" in check(trace(commit(0, range(len(pieces)), pieces=pieces, text=text), END))[0]


# --- replay ---

def test_lanes_are_replayed_by_their_own_clocks():
    slow, fast, end = (
        Stamped(0, 0, 1.0, Note("slow")),
        Stamped(1, 1, 0.5, Note("fast")),
        Stamped(0, 2, 2.0, Note("end")),
    )
    both = Trace([Header(0), Header(1)], [slow, fast, end])
    assert [(wait, stamped.event.text) for wait, stamped in replay(both)] == [
        (0.5, "fast"),
        (0.5, "slow"),
        (1.0, "end"),
    ]


def test_speed_divides_the_waits_and_keeps_the_order():
    waits = [wait for wait, _ in replay(speculative(), speed=4.0)]
    assert waits == [0.0] + [0.25] * (len(waits) - 1)
    assert [stamped for _, stamped in replay(speculative(), math.inf)] == speculative().events


@pytest.mark.parametrize("speed", [0.0, -1.0, math.nan])
def test_a_speed_that_leads_nowhere_is_refused(speed):
    with pytest.raises(Refusal, match="above 0"):
        replay(trace(), speed)


# --- imports ---

@pytest.mark.parametrize("module", ["playground.events", "playground.trace"])
def test_reading_a_trace_loads_neither_torch_nor_gradio(module):
    code = (
        f"import sys, {module}; print([heavy for heavy in ('torch', 'gradio', 'transformers') if heavy in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert shown.stdout.strip() == "[]"
