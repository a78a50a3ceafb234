"""Sandbox escapes: each attempt is stopped by either of the two defences alone.

Attempts are in tests/escapes. Without the first defence a program has every builtin and module of its process;
without the second its process has every system call and file. Without both, the attempts succeed.
"""
from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from playground.algorithms.programs import sandbox
from playground.algorithms.programs.confined import policy
from playground.questions.questions import gallery
from playground.questions.world import programs
from support.sandboxes import CANARY, CLASS_PATTERN, SECRET, Bait, bait, program, without  # noqa: F401

FOLDER = Path(__file__).with_name("escapes")


def attempts(name: str) -> list[str]:
    """Blocks of a file of attempts, after the comment that begins it."""
    return (FOLDER / name).read_text(encoding="utf-8").strip("\n").split("\n\n")[1:]


OBJECTS, SYSTEM, EXHAUSTION = attempts("objects.txt"), attempts("system.txt"), attempts("exhaustion.txt")


def answer(code: str) -> str:
    """The whole output of a program's process."""
    try:
        return repr(sandbox.tries(code, "work", [1]))
    except sandbox.NotRun as refusal:
        return str(refusal)


def outputs(bait: Bait, tried: list[str]) -> dict[str, str]:
    """The output of each attempt, after a check that none left a trace. Two at once, as on a page."""
    found = escapes(bait, tried, said := {})
    assert found == {} and bait.is_whole() and bait.processes() == []
    return said


def escapes(bait: Bait, tried: list[str], said: dict[str, str]) -> dict[str, list[str]]:
    """The traces of each attempt that left any; `said` receives the output of each."""
    found = {}
    with ThreadPoolExecutor(sandbox.AT_ONCE) as pool:
        for attempt, output in zip(tried, pool.map(answer, map(bait.fill, tried))):
            said[attempt] = output
            if traces := bait.traces(output):
                found[attempt] = traces
                bait.made.unlink(missing_ok=True)
    return found


# --- either defence alone ---

def test_there_are_three_hundred_attempts_and_no_two_are_the_same():
    tried = [*OBJECTS, *SYSTEM, *EXHAUSTION]
    assert len(set(tried)) == len(tried) > 600 and len(OBJECTS) > 300 and len(SYSTEM) > 250


@pytest.mark.slow
def test_nothing_gets_through_the_kernel_with_the_policy_removed(bait, without):
    without(policy=True)
    assert sandbox.call("import os\ndef work(x):\n    return os.name", "work", [1]) == ["posix"], "the policy is gone"
    outputs(bait, OBJECTS)


@pytest.mark.slow
def test_no_system_call_but_those_for_files_even_returns(bait, without, monkeypatch):
    """And those for files return an error, or a null pointer."""
    without(policy=True)
    monkeypatch.setattr(sandbox, "SECONDS", 60)  # the machine may be busy, and a process without time says nothing
    returned = {
        attempt: output
        for attempt, output in outputs(bait, SYSTEM).items()
        if output not in ("[None]", "[[-1]]", "[[0]]")
    }
    forged = returned.pop('__import__("os")._exit(77)')
    assert "this machine cannot confine" in forged, "a program can say that it was not run, and is not judged then"
    assert [output.count("Permission denied") for output in returned.values()] == [5], "every file of a list"


@pytest.mark.slow
def test_nothing_gets_through_the_policy_with_the_kernel_removed(bait, without):
    without(kernel=True)
    outputs(bait, OBJECTS)


@pytest.mark.parametrize("tried", [OBJECTS, SYSTEM], ids=["objects", "system"])
def test_the_policy_rejects_every_attempt_before_it_is_compiled(bait, tried):
    accepted = [attempt for attempt in tried if is_accepted(bait.fill(attempt))]
    assert accepted == []


def is_accepted(code: str) -> bool:
    try:
        policy.read(code)
    except (policy.NotAllowed, SyntaxError):
        return False
    return True


@pytest.mark.slow
def test_without_both_defences_the_attempts_escape(bait, without):
    """The planted fault shows that the bait is observed. These attempts leave a trace; the others only reach for
    one.
    """
    without(policy=True, kernel=True)
    leaving = [attempt for attempt in OBJECTS if "@" in attempt][::5]
    found = escapes(bait, leaving, {})
    assert len(found) > len(leaving) / 2
    assert {trace for traces in found.values() for trace in traces} >= {CANARY, "a file"}
    call = '__import__("socket").create_connection(("127.0.0.1", @port@)).close()'
    assert escapes(bait, [call, "1"], {}) == {call: ["a connection"]}


def test_a_process_that_survives_is_detected(bait, without, monkeypatch):
    without(policy=True, kernel=True)
    monkeypatch.setattr(sandbox, "SECONDS", 60)  # the machine may be busy
    started = answer(
        bait.fill(
            '__import__("subprocess").Popen(["sh", "-c", "sleep 99; : @made@"], stdout=-3, start_new_session=True).pid'
        )
    )
    deadline = time.monotonic() + 5
    while not bait.processes() and time.monotonic() < deadline:  # a process has no command line while it is loaded
        time.sleep(0.01)
    assert bait.processes() != [], started
    os.killpg(int(started.strip("[]")), signal.SIGKILL)


@pytest.mark.slow
def test_programs_that_exhaust_time_or_memory_end_soon(bait, without):
    without(policy=True)
    begun, before = time.monotonic(), children_cpu()
    with ThreadPoolExecutor(sandbox.AT_ONCE) as pool:
        said = list(pool.map(answer, map(bait.fill, EXHAUSTION)))
    assert max(map(len, said)) < 3 * policy.CHARACTERS
    assert children_cpu() - before < 1.5 * len(EXHAUSTION) and time.monotonic() - begun < 1.5 * sandbox.SECONDS * len(
        EXHAUSTION
    )
    assert bait.processes() == []


def children_cpu() -> float:
    """Seconds that processes which have ended took of the processor."""
    times = os.times()
    return times.children_user + times.children_system


# --- both defences ---

def test_the_class_pattern_attack_fails():
    assert sandbox.tries(CLASS_PATTERN, "work", [[]]) == [None]
    with pytest.raises(policy.NotAllowed, match="the attribute mro|Match"):
        policy.read(CLASS_PATTERN)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", EXHAUSTION[:1] + EXHAUSTION[14:15])
def test_an_endless_program_takes_one_second_of_cpu(attempt):
    before = children_cpu()
    assert sandbox.tries(program(attempt), "work", [1]) == [None]
    assert children_cpu() - before < 1.5


@pytest.mark.parametrize(
    "code",
    [
        "(" * 9000 + ")" * 9000,
        "[" * 3000,
        "-" * 15000 + "1",
        "f(" * 5000,
        "a=" * 9000 + "1",
        "x\0y",
        "\ud800",
        "if 1:\n" + " " * 19000 + "x",
        "1" * 19000,
        "lambda:" * 2800 + "1",
        "x" * 50_000,
        "'''",
        "\\",
        "x" + ".x" * 9000,
    ],
)
def test_text_that_chokes_a_parser_is_a_program_that_fails(code):
    assert sandbox.tries(code, "work", [1, 2]) == [None, None]


def test_the_process_has_no_environment_no_files_and_no_arguments_of_ours(without, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PAGE", SECRET)
    without(policy=True, kernel=True)
    look = (
        "import os, sys\ndef work(x):\n    return [dict(os.environ), sorted(os.listdir('/proc/self/fd')), os.getcwd(),"
        " sys.argv[1:]]"
    )
    environment, files, folder, arguments = sandbox.call(look, "work", [1])[0]
    assert SECRET not in str(environment) and folder == "/" and arguments == []
    assert files == ["0", "1", "2", "3"], "the request, the results, nothing, and the folder that is listed"


def test_only_the_pipe_for_results_stays_open(without):
    without(policy=True)
    listed = "import os\ndef work(x):\n    return os.write(x, b'')"
    assert sandbox.tries(listed, "work", [1]) == [[0]]
    for descriptor in (0, 2, 3, 4):
        assert sandbox.tries(listed, "work", [descriptor]) == [None]


def test_errors_of_a_program_stay_in_its_process(capfd):
    assert sandbox.tries("def work(x):\n    return 1 is x or 1 / 0", "work", [1, 2]) == [[True], None]
    assert sandbox.tries("def work(x:\n", "work", [1]) == [None]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "forged",
    [
        "not json",
        "[[1], [2]]",
        "{}",
        "[7]",
        "[[1, 2]]",
        "[" * 100_000,
        "[[" + "[" * 100 + "]" * 100 + "]]",
        "[" + "9" * 9000 + "]",
        '[["\ud800"',
        "null",
        "",
    ],
)
def test_whatever_a_process_writes_is_read_as_results_or_as_none(forged):
    assert sandbox._results(forged.encode(errors="replace"), 1) == [None]


def test_a_process_that_writes_without_end_is_ended(without):
    without(policy=True)
    flood = "import os\ndef work(x):\n    while True:\n        os.write(1, b'x' * 65536)"
    begun = time.monotonic()
    assert sandbox.tries(flood, "work", [1]) == [None] and time.monotonic() - begun < sandbox.SECONDS


def test_results_come_back_as_json_gives_them():
    code = "def work(x):\n    return {'a': (1, 2.5), 'b': [None, True, x.upper()]}"
    assert sandbox.call(code, "work", ["é\ud800"]) == [{"a": [1, 2.5], "b": [None, True, "É\ud800"]}]
    assert sandbox.tries("def work(x):\n    return {x}", "work", [1]) == [None]


# --- legitimate programs ---

@pytest.mark.slow
def test_every_known_program_is_written_with_what_is_allowed_and_runs():
    known = [question.answer for question in gallery() if question.task == "programs"]
    drawn = [programs.generate(random.Random(seed), False, grade) for seed in range(100) for grade in programs.GRADES]
    for code in [*known, *(item.answer for item in drawn)]:
        policy.read(code)
    assert all(programs.score(item, item.answer) == 1 for item in drawn[::40])


@pytest.mark.parametrize(
    "body",
    [
        "return sum(v ** 2 for v in x if v % 2)",
        "return sorted(map(str, x), key=len)",
        "return dict(zip(x, x)).get(1, 0)",
        "out = []\n    for v in x:\n        out.append(v)\n    return out",
        "return f'{x[0]:>3} {len(x)}'",
        "return list(map(str.upper, ['a']))",
        "try:\n        return x[9]\n    except IndexError:\n        return -1",
        "while x and x[0]:\n        x.pop()\n    return x",
        "return '%d' % len(x)",
        "a, *rest = x\n    return rest",
        "best = lambda v: -v\n    return max(x, key=best)",
        "return isinstance(x, list) and not isinstance(x, str)",
        "if (n := len(x)) > 2:\n        return n\n    return None",
        "return ' '.join(w.strip().title() for w in 'a b'.split())",
        "_ = x\n    return round(sum(_) / 3, 2)",
        "def inner(v):\n        nonlocal x\n        x = [*x, v]\n    inner(4)\n    return x",
    ],
)
def test_ordinary_python_is_allowed(body):
    assert sandbox.tries(f"def work(x: list[int]) -> list:\n    {body}", "work", [[1, 2, 3]])[0] is not None


def test_the_allowed_builtins_and_methods_reach_no_attribute_by_name():
    assert not policy.METHODS & {
        "format",
        "format_map",
        "mro",
        "encode",
        "send",
        "throw",
        "close",
        "with_traceback",
        "args",
        "obj",
    }
    assert not policy.BUILTINS & {
        "type",
        "getattr",
        "setattr",
        "object",
        "open",
        "eval",
        "exec",
        "vars",
        "format",
        "iter",
        "super",
        "compile",
    }
    assert not any("__" in name or name.startswith("_") for name in policy.METHODS | policy.BUILTINS)
