"""The sandbox under concurrency, without confinement, and behind a gallery question."""
from __future__ import annotations

import ast
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import playground
from playground.algorithms.programs import sandbox
from playground.algorithms.programs.confined import syscalls
from playground.bench.survey.survey import score
from playground.cli import terminal_view as screen
from playground.contract import find, make
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Judged
from playground.questions.questions import ask, gallery, judging, verdict
from playground.request_limits import Rules
from playground.trace.result import Result
from playground.ui.benchmark.survey_run import judge_for
from support.sandboxes import CANARY, CLASS_PATTERN, bait, without  # noqa: F401


@pytest.fixture(scope="module")
def bundled():
    return playground.load()


# --- concurrency ---

def test_no_more_than_two_programs_run_at_once(monkeypatch):
    running, most, lock = [], [], threading.Lock()

    def slow(*_) -> bytes:
        with lock:
            running.append(1)
            most.append(len(running))
        time.sleep(0.05)
        with lock:
            running.pop()
        return b"[[1]]"

    sandbox.unavailable()
    monkeypatch.setattr(sandbox, "_answer", slow)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda _: sandbox.tries("", "work", [1]), range(6))) == [[[1]]] * 6
    assert max(most) == sandbox.AT_ONCE


def test_a_visitor_without_a_place_gets_a_message_and_nothing_is_judged(monkeypatch):
    sandbox.unavailable()
    monkeypatch.setattr(sandbox, "_places", threading.BoundedSemaphore(1))
    monkeypatch.setattr(sandbox, "WAIT_SECONDS", 0.05)
    question = program_question()
    with sandbox._place():
        with pytest.raises(sandbox.NotRun, match="too many are running"):
            sandbox.tries(question.answer, "work", [1])
        assert not verdict(question, question.answer).checked


def test_a_search_ends_when_its_programs_took_too_long(monkeypatch, bundled):
    planning = sys.modules[find("pg_td").__module__]
    monkeypatch.setattr(planning, "PROGRAM_SECONDS", 0.0)
    outcome = playground.run(
        "pg_td",
        "Python: def work(items). Return 7.",
        chat=True,
        max_new_tokens=24,
        models=bundled,
        knobs={"tests": "work(1) == 2", "rollouts": 6},
    )
    notes = [stamped.event.text for stamped in outcome.trace.events if stamped.event.kind == "note"]
    assert sum(note.startswith("Rollout") for note in notes) == 1
    assert any("its programs took more than" in note for note in notes)


# --- machines without confinement ---

def program_question():
    return next(question for question in gallery() if question.task == "programs")


def no_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyseccomp", None)


def no_library(monkeypatch) -> None:
    def compiled():
        raise syscalls.NoSeccomp("Unable to find libseccomp")
    monkeypatch.setattr(syscalls, "compiled", compiled)


def kernel_refuses(monkeypatch) -> None:
    monkeypatch.setattr(syscalls, "compiled", lambda: bytes(8))  # no instruction that a kernel takes for a filter


def filter_without_effect(monkeypatch) -> None:
    allow = bytes([6, 0, 0, 0, 0, 0, 255, 127])
    monkeypatch.setattr(syscalls, "compiled", lambda: allow)


@pytest.fixture(params=[no_package, no_library, kernel_refuses, filter_without_effect], ids=lambda fake: fake.__name__)
def unconfined(request, monkeypatch) -> Iterator[None]:
    syscalls.compiled.cache_clear()
    sandbox.unavailable.cache_clear()
    compiled = syscalls.compiled
    request.param(monkeypatch)
    yield
    compiled.cache_clear()
    sandbox.unavailable.cache_clear()


def test_a_machine_that_cannot_confine_runs_nothing_and_says_so(unconfined, tmp_path, without):
    assert "cannot confine" in sandbox.unavailable()
    without(policy=True)
    with pytest.raises(Refusal, match="cannot confine a program"):
        sandbox.tries(f"open({str(tmp_path / 'made')!r}, 'w')\ndef work(x):\n    return x", "work", [1])
    assert not (tmp_path / "made").exists()


def test_there_a_search_by_running_programs_is_refused_before_the_run(unconfined):
    with pytest.raises(Refusal, match="^Planning-guided decoding runs programs .*, and this machine cannot confine"):
        make("pg_td")


def test_there_programs_are_not_judged_and_other_answers_are(unconfined):
    question = program_question()
    judged = verdict(question, question.answer)
    assert (
        judged == Judged(0.0, question.answer, checked=False, why=judged.why)
        and "this machine cannot confine a program" in judged.why
    )
    assert score(question, question.answer) is None and judge_for(Rules())(question, question.answer) is None
    arithmetic = ask("arithmetic", 1, 1)[0]
    assert verdict(arithmetic, arithmetic.answer).checked


def test_there_the_shell_says_why(unconfined):
    question = program_question()
    assert "not judged: this machine cannot confine a program" in screen._score_text(verdict(question, question.answer))


# --- a gallery question with an answer chosen by the visitor ---

@pytest.mark.parametrize(
    "removed", [{}, {"policy": True}, {"kernel": True}], ids=["both walls", "policy removed", "kernel removed"]
)
def test_a_visitors_program_from_a_choice_is_not_run(bait, without, bundled, removed):
    without(**removed)
    attack = bait.fill("open('@made@', 'w').write(open('@canary@').read())")
    assert judged(bundled, attack) == Judged(0.0, program_question().answer)
    assert bait.traces("") == [] and bait.is_whole()


def test_without_defences_that_program_escapes(bait, without, bundled):
    without(policy=True, kernel=True)
    judged(bundled, bait.fill("open('@made@', 'w').write(open('@canary@').read())"))
    assert bait.made.read_text() == CANARY


def test_the_class_pattern_attack_from_a_choice_fails(bundled):
    assert judged(bundled, CLASS_PATTERN).score == 0


def judged(models, attack: str) -> Judged:
    """A gallery question about a program, answered with a text forced by a constraint."""
    question = program_question()
    attack = attack.replace("def work(", f"def {question.meta['name']}(")
    config = LaneConfig("greedy", extras=[("choice", {"options": attack})])
    session = prepare(models, [config], Prompt(question.prompt, chat=True), Limits(0, 200), judge=judging(question))
    list(session)
    result = Result(session.trace)
    assert result.text == attack
    return result.judged


def test_a_program_of_the_visitors_that_is_right_is_still_judged_right():
    question = program_question()
    assert verdict(question, question.answer) == Judged(1.0, question.answer)


def test_the_scripts_of_the_process_import_nothing_but_the_standard_library():
    for name in ("runner", "policy", "kernel"):
        tree = ast.parse(sandbox.RUNNER.with_name(f"{name}.py").read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported - {"kernel", "policy"} <= sys.stdlib_module_names


def test_a_process_that_cannot_be_started_is_reported_and_tried_again(monkeypatch):
    def none_left(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    sandbox.unavailable.cache_clear()
    with monkeypatch.context() as full:
        full.setattr(subprocess, "Popen", none_left)
        with pytest.raises(sandbox.NotRun, match="no process could be started"):
            sandbox.tries("", "work", [1])
    assert sandbox.tries("def work(x):\n    return x", "work", [1]) == [[1]]
