"""Sandbox escapes: each attempt is stopped by either of the two defences alone.

Attempts are in tests/escapes. Without the first defence a program has every builtin and module of its process;
without the second its process has every system call and file. Without both, the attempts succeed.
"""
from __future__ import annotations

import ast
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import playground
from playground.algorithms.programs import sandbox
from playground.algorithms.programs.confined import policy, syscalls
from playground.bench.questions import ask, gallery, judging, verdict
from playground.bench.survey import score
from playground.cli import terminal_view as screen
from playground.contract import find, make
from playground.contract.lane_config import LaneConfig
from playground.decoding.session import Limits, Prompt, prepare
from playground.errors import Refusal
from playground.events import Judged
from playground.pocket.world import programs
from playground.trace.result import Result
from playground.ui.settings import Rules
from playground.ui.survey_run import judge_for

FOLDER = Path(__file__).with_name("escapes")
CANARY, SECRET = "canary-5f1c9e", "secret-b83a07"
CLASS_PATTERN = """def work(items):
    O = str.mro()[1]
    match O:
        case O(__subclasses__=subclasses):
            return [c for c in subclasses(O) if "wrap_close" in str(c)]"""

NO_POLICY = """
import ast, builtins, importlib, re, sys
import kernel
confine = kernel.confine
def confine_with_modules(syscall_filter):  # those that the program names, for none can be read from a file afterwards
    code = sys._getframe(1).f_locals["request"]["code"]
    for name in set(re.findall('import[_(" ]+([a-z_]+)', code)) & sys.stdlib_module_names - {"antigravity"}:
        importlib.import_module(name)
    confine(syscall_filter)
kernel.confine = confine_with_modules
def read(code): return ast.parse(code)
def namespace(): return {"__builtins__": builtins}
"""
NO_KERNEL = """
def confine(syscall_filter):
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (4 * MEMORY_BYTES, 4 * MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_REAL, 12 * WALL_SECONDS)
"""


@dataclass
class Bait:
    """The bait of an escape: a file to read, one to create, a port to connect to, a process to end."""

    folder: Path
    listener: socket.socket
    bystander: subprocess.Popen

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    @property
    def made(self) -> Path:
        return self.folder / "made"

    def fill(self, attempt: str) -> str:
        filled = {
            "canary": self.canary,
            "made": self.made,
            "port": self.listener.getsockname()[1],
            "pid": self.bystander.pid,
            "libc": '__import__("ctypes").CDLL(None, use_errno=True)',
        }
        for name, value in filled.items():
            attempt = attempt.replace(f"@{name}@", str(value))
        return program(attempt)

    def traces(self, output: str) -> list[str]:
        """Traces of an escape, in the system and in its output."""
        said = [word for word in (CANARY, SECRET) if word in output]
        return said + (["a file"] if self.made.exists() else []) + (["a connection"] if self.was_called() else [])

    def was_called(self) -> bool:
        try:
            self.listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def is_whole(self) -> bool:
        return (
            self.canary.read_text() == CANARY
            and self.canary.stat().st_mode & 0o777 == 0o644
            and self.bystander.poll() is None
        )

    def processes(self) -> list[str]:
        """Command lines of processes that were started from this folder or mention it."""
        lines = [read_or_nothing(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        return [line for line in lines if str(self.folder) in line]


def read_or_nothing(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""


@pytest.fixture
def bait(tmp_path, monkeypatch) -> Iterator[Bait]:
    monkeypatch.setenv("SECRET_OF_THE_PAGE", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as listener, subprocess.Popen(["sleep", "600"]) as bystander:
        listener.setblocking(False)
        bait = Bait(tmp_path, listener, bystander)
        bait.canary.write_text(CANARY)
        bait.canary.chmod(0o644)
        yield bait
        bystander.kill()


def attempts(name: str) -> list[str]:
    """Blocks of a file of attempts, after the comment that begins it."""
    return (FOLDER / name).read_text(encoding="utf-8").strip("\n").split("\n\n")[1:]


def program(attempt: str) -> str:
    if "\n" not in attempt and not attempt.startswith("raise"):
        return f"def work(x):\n    return {attempt}"
    return f"{attempt}\ndef work(x):\n    return out"


@pytest.fixture(scope="module")
def bundled():
    return playground.load()


OBJECTS, SYSTEM, EXHAUSTION = attempts("objects.txt"), attempts("system.txt"), attempts("exhaustion.txt")


@pytest.fixture
def without(monkeypatch, tmp_path) -> Callable[..., None]:
    """Remove a defence: the process runs from a copy of its scripts in which one or both do nothing."""
    def take_away(policy: bool = False, kernel: bool = False) -> None:
        folder = shutil.copytree(
            sandbox.RUNNER.parent, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__")
        )
        if policy:
            (folder / "policy.py").write_text(NO_POLICY)
        if kernel:
            (folder / "kernel.py").write_text((folder / "kernel.py").read_text() + NO_KERNEL)
        monkeypatch.setattr(sandbox, "RUNNER", folder / "runner.py")
    return take_away


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


def test_nothing_gets_through_the_kernel_with_the_policy_removed(bait, without):
    without(policy=True)
    assert sandbox.call("import os\ndef work(x):\n    return os.name", "work", [1]) == ["posix"], "the policy is gone"
    outputs(bait, OBJECTS)


def test_no_system_call_but_those_for_files_even_returns(bait, without):
    """And those for files return an error, or a null pointer."""
    without(policy=True)
    returned = {
        attempt: output
        for attempt, output in outputs(bait, SYSTEM).items()
        if output not in ("[None]", "[[-1]]", "[[0]]")
    }
    forged = returned.pop('__import__("os")._exit(77)')
    assert "this machine cannot confine" in forged, "a program can say that it was not run, and is not judged then"
    assert [output.count("Permission denied") for output in returned.values()] == [5], "every file of a list"


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
            '__import__("subprocess").Popen(["sh", "-c", "sleep 9; : @made@"], stdout=-3, start_new_session=True).pid'
        )
    )
    assert bait.processes() != [], started
    os.killpg(int(started.strip("[]")), signal.SIGKILL)


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
    told = playground.run("pg_td", "Python: def work(items). Return 7.", chat=True, max_new_tokens=24, models=bundled,
                          knobs={"tests": "work(1) == 2", "rollouts": 6})
    notes = [stamped.event.text for stamped in told.trace.events if stamped.event.kind == "note"]
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
    said = "Planning-guided decoding runs programs that a model wrote, and this machine cannot confine"
    with pytest.raises(Refusal, match=said):
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
    recipe = LaneConfig("greedy", extras=[("choice", {"options": attack})])
    session = prepare(models, [recipe], Prompt(question.prompt, chat=True), Limits(0, 200), judge=judging(question))
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
