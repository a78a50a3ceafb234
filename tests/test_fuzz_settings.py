"""What people and programs send is read or refused with a sentence: links, lessons, knobs, requests, questions."""
from __future__ import annotations

import json
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from playground.contract import discover, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.errors import Refusal
from playground.questions.user_questions import questions_in, read_questions
from playground.request_limits import Rules
from playground.ui.components.settings import Settings
from playground.ui.play.lessons import read_lesson
from playground.ui.server.api import settings_of
from support.fuzzing import changed, damaged, folder, fuzz, junk, scalars, texts  # noqa: F401

ROOT = Path(__file__).parents[1]
QUICK = 2.0  # seconds in which knobs are read or refused
DEEP = "[" * 20_000 + "]" * 20_000


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
