"""Untrusted input is read or refused with a sentence: traces, links, lessons, knobs, requests, questions,
grammars.

FUZZ_EXAMPLES sets how many examples each property gets (default 20); the test marked `long` runs all of them with
1,000. Examples are derandomised, so a failure repeats.
"""
from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from playground.contract import discover, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.errors import Refusal
from playground.events import Candidate, Commit, Done, Header, Stamped, Step
from playground.player.frames import recording, trace_of
from playground.player.standalone import to_html
from playground.questions.user_questions import questions_in, read_questions
from playground.request_limits import Rules
from playground.trace import Trace, check
from playground.trace.csv_export import COLUMNS, FORMULA, NUMBER, to_csv
from playground.trace.lane_metrics import metrics
from playground.trace.transcript import sequences
from playground.ui.components.settings import Settings
from playground.ui.play.lessons import read_lesson
from playground.ui.server.api import settings_of
from support.traces import everything

ROOT = Path(__file__).parents[1]
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 20))
MANY = 1000  # examples of each property in the long run
QUICK = 2.0  # seconds in which knobs are read or refused
LONGEST_GRAMMAR = 4000  # characters
COMPILED = 20.0  # seconds in which such a grammar is compiled or refused
fuzz = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much])

# --- generators ---

NASTY = [
    "",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "=1+1",
    "+cmd|' /C calc'!A0",
    "@x",
    "\t=1",
    "\r=1",
    "</script><script>alert(1)</script>",
    "<!--",
    "{{trace}}",
    "\u2028",
    "\u202e",
    "%s{0}",
    "../../etc/passwd",
    "NaN",
    "1e999",
    "𝔘",
    "é" * 50,
    "a" * 5000,
    "<0xFF>",
    "[SEP]",
    '"',
    "\\",
    "\x85",
    "\n\n",
    "|",
    "=>",
]
NUMBERS = [
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    -float("inf"),
]
texts = st.sampled_from(NASTY) | st.text(st.characters(), max_size=20)
scalars = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.integers() | st.floats() | texts
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
OF_TYPE = {
    int: st.integers(-2, 20) | st.integers(),
    float: st.floats(-2, 2) | st.floats(),
    str: texts,
    bool: st.booleans(),
}
DEEP = "[" * 20_000 + "]" * 20_000


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of everything within a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def put(value: Any, path: tuple, new: Any) -> Any:
    """A copy of a JSON value with another value at a path."""
    if not path:
        return new
    copy = deepcopy(value)
    within = copy
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = new
    return copy


@st.composite
def changed(draw: Callable, value: Any) -> Any:
    """A JSON value with one to three parts replaced, half of them by something of the same type."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(places(value))))
        alike = OF_TYPE.get(type(at(value, place)), junk)
        value = put(value, place, draw(alike | junk))
    return value


def at(value: Any, path: tuple) -> Any:
    """The value at a path of a JSON value."""
    for key in path:
        value = value[key]
    return value


@st.composite
def damaged(draw: Callable, text: str) -> bytes:
    """A text as bytes, with a piece cut out, doubled, or replaced by others."""
    raw = text.encode("utf-8", "surrogatepass")
    start, length = draw(st.integers(0, len(raw))), draw(st.integers(0, 40))
    middle = draw(
        st.binary(max_size=8)
        | st.sampled_from(
            [b"", b"\0", b"\xff", b"\xed\xa0\x80", b'"', b"}", b"[" * 20_000, b"1" * 5000, b"NaN", b"1e999"]
        )
    )
    return raw[:start] + draw(st.sampled_from([middle, raw[start:start + length] * 2])) + raw[start + length:]


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


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


# --- links and requests ---

SET = asdict(
    Settings(
        prompt="The red fox",
        system="Be brief.",
        stop="\\n",
        before=[["a", "b"]],
        lanes=[
            {
                "strategy": "sample",
                "knobs": {"temperature": 0.7},
                "extras": [["top_p", {"p": 0.9}]],
                "forced": [1, 2],
                "seed": 3,
            }
        ],
    )
)


def set_up(found: Settings) -> None:
    """What a page does with settings before a run."""
    found.to_code().encode("ascii")
    assert Settings.from_code(found.to_code()) == found
    try:
        found.check(Rules.for_visitors())
        for config in found.configs():
            assemble(config)
    except Refusal as refusal:
        str(refusal).encode("utf-8", "surrogatepass")


@fuzz
@given(changed(SET))
@example({"prompt": "\ud800"})
@example({"lanes": [{"strategy": "greedy", "forced": [10**400]}]})
def test_a_link_with_parts_replaced_sets_the_page(document: Any):
    set_up(Settings.read(document))


@fuzz
@given(
    damaged(Settings(**SET).to_code()) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
@example(b"")
@example(b"\xff")
def test_any_code_is_a_link_or_is_ignored(raw: bytes):
    found = Settings.from_code(raw.decode("utf-8", "surrogateescape"))
    if found is not None:
        set_up(found)


@fuzz
@given(changed({name: value for name, value in SET.items() if name not in ("dtype", "quantization")}))
def test_a_request_of_a_program_is_understood_or_refused(asked: Any):
    assume(isinstance(asked, dict) and "lanes" in asked)
    try:
        found = settings_of(asked)
        found.check(Rules.for_visitors())
    except Refusal:
        return
    found.configs()


# --- lessons and questions ---

LESSON = (ROOT / "assets" / "lessons" / "04-guessing-ahead.md").read_text(encoding="utf-8")
QUESTION = {"prompt": "What is 2 + 3?", "answer": "5", "contains": True, "task": "sums", "chat": True, "context": ""}


@fuzz
@given(damaged(LESSON))
@example(b"\xff")
@example(f"{LESSON}lanes: {DEEP}\n".encode())
@example(LESSON.replace("minutes: ", f"minutes: {'9' * 5000}").encode())
def test_a_damaged_lesson_is_read_or_refused(folder: Path, raw: bytes):
    path = folder / "01-lesson.md"
    path.write_bytes(raw)
    try:
        lesson = read_lesson(path)
    except Refusal:
        return
    assert lesson.steps and all(isinstance(Settings.read(step.settings), Settings) for step in lesson.steps)


@fuzz
@given(st.lists(changed(QUESTION), min_size=1, max_size=3))
def test_questions_with_parts_replaced_are_read_or_refused(entries: list[Any]):
    try:
        found = questions_in("\n".join(json.dumps(entry) for entry in entries))
    except Refusal:
        return
    for question in found:
        assert isinstance(question.prompt, str) and isinstance(question.task, str)


@fuzz
@given(damaged("\n".join([json.dumps(QUESTION)] * 2)))
def test_a_damaged_file_of_questions_is_read_or_refused(folder: Path, raw: bytes):
    path = folder / "questions.jsonl"
    path.write_bytes(raw)
    try:
        read_questions(path)
    except Refusal:
        return


# --- knobs and configs ---

@cache
def knob_values(name: str) -> st.SearchStrategy:
    """Values for some knobs and slots of a strategy: junk, or of the knob's type within and around its limits."""
    cls = discover()[name]
    given_ = {knob.name: _values_of(knob) for knob in cls.knobs()} | {
        slot: st.sampled_from(sorted(discover())) | texts for slot in cls.slots()
    }
    return st.fixed_dictionaries({}, optional=given_)


def _values_of(knob: Any) -> st.SearchStrategy:
    limits = [value for value in (knob.min, knob.max) if value is not None]
    near = [value + change for value in limits for change in (-1, 0, 1)] or [0]
    likely = {
        int: st.integers(int(min(near)), int(max(near))),
        float: st.floats(min(near), max(near)),
        bool: st.booleans(),
        str: texts,
    }[knob.type]
    return st.sampled_from(knob.choices) | texts if knob.choices else likely | likely | scalars | junk


@fuzz
@given(st.data())
def test_any_values_of_knobs_make_a_strategy_or_a_refusal(data: st.DataObject):
    """Each example makes four strategies."""
    for name in data.draw(st.lists(st.sampled_from(sorted(discover())), min_size=4, max_size=4)):
        values = data.draw(knob_values(name), label=name)
        start = time.monotonic()
        try:
            assert make(name, **values).name == name
        except Refusal as refusal:
            assert str(refusal)
        assert time.monotonic() - start < QUICK, f"{name} took {time.monotonic() - start:.1f} s"


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan")])
def test_a_number_that_no_knob_can_hold_is_refused(value):
    with pytest.raises(Refusal):
        make("top_k", k=value)


@fuzz
@given(st.data())
def test_any_config_is_assembled_or_refused(data: st.DataObject):
    names = sorted(discover())
    main, others = data.draw(st.sampled_from(names)), data.draw(st.lists(st.sampled_from(names), max_size=3))
    extras = [(other, data.draw(knob_values(other))) for other in others]
    try:
        assemble(LaneConfig(main, data.draw(knob_values(main)), extras))
    except Refusal as refusal:
        assert str(refusal)


# --- grammars, compiled in a child process that may die ---

def _compile_in_turn(pipe: Any) -> None:
    """Compile what comes through a pipe and report the outcome; runs in a child process."""
    from transformers import AutoTokenizer

    from playground.grammar.matcher import GrammarEngine
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "models" / "pocket")
    engine = GrammarEngine(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    while True:
        kind, source = pipe.recv()
        try:
            if kind == "syncode":
                make(kind, source=source).begin(0, lambda token: tokenizer.decode([token]).encode())
            matcher = engine.compile("lark" if kind == "syncode" else kind, source).matcher()
            matcher.mask(), matcher.forced()
            pipe.send("compiled")
        except Refusal:
            pipe.send("refused")
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


class Compiler:
    """A child process that compiles grammars; one that dies or takes too long is replaced."""

    def __init__(self) -> None:
        self.process: multiprocessing.Process | None = None

    def compile(self, kind: str, source: str) -> str:
        """The outcome: compiled, refused, died, too slow, or an error."""
        if self.process is None or not self.process.is_alive():
            self._start()
        self.pipe.send((kind, source))
        if not self.pipe.poll(COMPILED):
            self.stop()
            return "too slow"
        try:
            return self.pipe.recv()
        except EOFError:
            self.stop()
            return "died"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_compile_in_turn, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.send(("regex", "a"))
        assert self.pipe.poll(120) and self.pipe.recv() == "compiled"


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.stop()


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 5},
        "b": {"$ref": "#/$defs/n"},
        "c": {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 3},
    },
    "$defs": {"n": {"type": "integer", "minimum": 1, "multipleOf": 3}},
    "required": ["a"],
    "anyOf": [{"minProperties": 1}],
    "additionalProperties": False,
}
LARK = 'start: item ("," item)*\nitem: WORD | NUMBER | "(" start ")"\nWORD: /[a-z]{1,5}/\nNUMBER: /[0-9]+/\n%ignore / /'
GBNF = 'root ::= item ("," item)*\nitem ::= word | [0-9]+ | "(" root ")"\nword ::= [a-z] [a-z]*\n'
PATTERNS = [
    "[0-9]{1,3}",
    "(a|b)*c",
    "\\d+(\\.\\d+)?",
    "(?i)x",
    "[^\\W]",
    "a{2,}",
    "(?=a)b",
    "\\p{L}+",
    "^$",
    "(a*)*b",
    "\\1",
    ".{0,20}",
]
sources = st.one_of(
    st.tuples(st.just("json_schema"), changed(SCHEMA).map(json.dumps)),
    st.tuples(
        st.sampled_from(["lark", "syncode"]), damaged(LARK).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
    ),
    st.tuples(st.just("gbnf"), damaged(GBNF).map(lambda raw: raw.decode("utf-8", "surrogateescape"))),
    st.tuples(st.just("regex"), st.lists(st.sampled_from(PATTERNS) | texts, max_size=4).map("".join)),
    st.tuples(st.just("choice"), st.lists(texts, max_size=4).map("|".join)),
).map(lambda source: (source[0], source[1][:LONGEST_GRAMMAR]))


@pytest.mark.slow
@fuzz
@given(source=sources)
# llguidance panics, which is a BaseException
@example(source=("json_schema", json.dumps({"required": {"a" * 97 + "é": 1}})))
@example(source=("regex", "\ud800"))
def test_any_grammar_is_compiled_or_refused_and_the_process_lives(compiler: Compiler, source: tuple[str, str]):
    assert compiler.compile(*source) in ("compiled", "refused")


# --- the long run ---

@pytest.mark.long
def test_every_property_holds_for_a_thousand_examples():
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not long", __file__],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"FUZZ_EXAMPLES": str(MANY)},
        timeout=3600,
    )
    assert finished.returncode == 0, finished.stdout[-3000:]
