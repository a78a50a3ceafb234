"""The confined child: what a task cannot reach, and a child that was stopped, killed or is busy."""
from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event as Flag
from time import perf_counter

import pytest

from playground.confined.child import BrokenLimit, Busy, Cancelled, ChildLesson, ConfinedChild, ConfinedTask
from playground.confined.walls import syscall_filter
from support.confined_attacks import ATTACKS, BOUNDS

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not say or enforce it")
WORK = "support.confined_attacks"
PROMPTLY = 8.0  # a new process on a loaded machine; a stopped one took 30 s


@pytest.fixture(scope="module")
def shared() -> Iterator[ConfinedChild]:
    yield from made()


@pytest.fixture
def own() -> Iterator[ConfinedChild]:
    yield from made()


def made() -> Iterator[ConfinedChild]:
    child = ConfinedChild(WORK, BOUNDS)
    yield child
    child.close()


def ask(child: ConfinedChild, name: str, *arguments, **options):
    return child.ask([name, *arguments], wait_seconds=10.0, **options)


def seconds(act) -> float:
    start = perf_counter()
    act()
    return perf_counter() - start


# --- what a task cannot reach ---

# with the limits of the kernel alone
WITHOUT_FILTER = ["read_file", "list_folder", "connect", "unix_socket", "open_pipe", "write_file"]
if "io_uring_setup" in ATTACKS:  # by numbers of calls, and machine code
    WITHOUT_FILTER += ["memfd_create", "open_by_32_bits", "x32_open", "x32_socket", "io_uring_setup",
                       "x32_io_uring_setup", "io_uring_register"]


def reaches(child: ConfinedChild, name: str, secret: str) -> str:
    try:
        return ask(child, name, secret, os.getpid(), child.pid)
    except BrokenLimit:  # a wall has ended it
        return "ended"


@pytest.mark.parametrize("name", ATTACKS)
def test_a_task_reaches_nothing_outside(shared, tmp_path, name):
    secret = tmp_path / "secret.txt"
    secret.write_text("swordfish", encoding="utf-8")
    assert reaches(shared, name, str(secret)) != "reached"
    assert secret.read_text(encoding="utf-8") == "swordfish" and os.listdir(tmp_path) == ["secret.txt"]
    assert ask(shared, "echo", 1) == 1


def test_without_the_filter_of_system_calls_no_file_is_opened_either(tmp_path):
    """The limits of the kernel alone, as on macOS."""
    child = ConfinedChild("support.confined_attacks_unfiltered", BOUNDS)
    secret = tmp_path / "secret.txt"
    secret.write_text("swordfish", encoding="utf-8")
    try:
        for name in WITHOUT_FILTER:
            assert reaches(child, name, str(secret)) != "reached", name
    finally:
        child.close()


def test_a_task_has_no_environment_of_the_page(shared, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "swordfish")
    assert "swordfish" not in repr(ask(shared, "environment"))


@linux
@pytest.mark.parametrize(
    "name, reason",
    [("loop", "time"), ("sleep", "time"), ("hoard", "memory"), ("recurse", "memory"), ("flood", "memory")],
)
def test_a_task_that_breaks_a_limit_dies_alone(shared, name, reason):
    before = shared.pid
    with pytest.raises(BrokenLimit, match=reason):
        ask(shared, name)
    assert ask(shared, "echo", [2]) == [2] and shared.pid == before


@linux
def test_the_filter_is_there_where_its_library_is():
    assert syscall_filter() is not None


# --- a child that does not answer ---

@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_child_that_was_stopped_or_killed_delays_the_next_task_by_its_start_only(own, how):
    assert ask(own, "echo", 3) == 3
    first = own.pid
    os.kill(first, how)
    assert seconds(lambda: ask(own, "echo", 4)) < PROMPTLY and own.pid != first


@linux
def test_a_child_that_is_stopped_while_it_learns_is_replaced(own):
    ask(own, "echo", 3)
    os.kill(own.pid, signal.SIGSTOP)
    lesson = ChildLesson("large", lambda: "x" * (8 << 20))
    assert seconds(lambda: ask(own, "lesson_length", lesson=lesson)) < PROMPTLY
    assert ask(own, "lesson_length", lesson=lesson) == 8 << 20


def test_a_fork_that_was_stopped_is_killed_after_its_time(own):
    ask(own, "echo", 3)
    wait_until(lambda: not forks_of(own.pid))
    waiting = ThreadPoolExecutor(1).submit(ask, own, "sleep")
    os.kill(first_fork(own), signal.SIGSTOP)
    with pytest.raises(BrokenLimit, match="time"):
        waiting.result(BOUNDS.wall_seconds + 5)
    wait_until(lambda: not forks_of(own.pid))


def test_a_fork_that_is_killed_in_the_middle_of_its_task_fails_at_once_and_the_next_works(own):
    """As by the kernel when memory runs out."""
    ask(own, "echo", 3)
    wait_until(lambda: not forks_of(own.pid))
    waiting = ThreadPoolExecutor(1).submit(ask, own, "sleep")
    fork = first_fork(own)
    Flag().wait(0.4)  # before it has taken the order, another fork would get it
    os.kill(fork, signal.SIGKILL)
    start = perf_counter()
    with pytest.raises(BrokenLimit, match="memory"):
        waiting.result(BOUNDS.wall_seconds)
    assert perf_counter() - start < BOUNDS.wall_seconds / 2 and ask(own, "echo", 4) == 4


def test_a_child_that_is_killed_in_the_middle_of_a_task_loses_nothing(own):
    """Its fork goes on, and the next order starts another child."""
    ask(own, "echo", 3)
    wait_until(lambda: not forks_of(own.pid))
    waiting = ThreadPoolExecutor(1).submit(ask, own, "echo_later", 5)
    first_fork(own)
    os.kill(own.pid, signal.SIGKILL)
    assert ask(own, "echo", 4) == 4 and waiting.result(PROMPTLY) == 5


def test_a_lesson_is_kept_and_taught_again_when_it_was_dropped(own):
    taught = []

    def lesson(name: str) -> ChildLesson:
        return ChildLesson(name, lambda: taught.append(name) or name)

    for name in ("aa", "aa", "bbb", "c", "aa"):
        assert ask(own, "lesson_length", lesson=lesson(name)) == len(name)
    assert taught == ["aa", "bbb", "c", "aa"]


@linux
def test_a_cancelled_task_ends_its_fork_at_once(own):
    ask(own, "echo", 3)
    wait_until(lambda: not forks_of(own.pid))
    task, threads = ConfinedTask(), ThreadPoolExecutor(1)
    waiting = threads.submit(ask, own, "sleep", task=task)
    first_fork(own)
    task.cancel()
    with pytest.raises(Cancelled):
        waiting.result(5)
    wait_until(lambda: not forks_of(own.pid))


def test_a_task_waits_for_a_place_as_long_as_it_may(own):
    ask(own, "echo", 3)
    threads = ThreadPoolExecutor(BOUNDS.at_once)
    running = [threads.submit(ask, own, "sleep") for _ in range(BOUNDS.at_once)]
    wait_until(lambda: len(forks_of(own.pid)) == BOUNDS.at_once)
    with pytest.raises(Busy):
        own.ask(["echo", 1], wait_seconds=0.05)
    task = ConfinedTask()
    waiting = ThreadPoolExecutor(1).submit(own.ask, ["echo", 1], wait_seconds=30.0, task=task)
    task.cancel()
    with pytest.raises(Cancelled):
        waiting.result(2)
    for each in running:
        with pytest.raises(BrokenLimit):
            each.result(10)


def test_a_work_module_that_cannot_be_loaded_says_so():
    with pytest.raises(BrokenLimit, match="start"):
        ConfinedChild("support.no_such_work", BOUNDS).ask([], wait_seconds=1.0)


def forks_of(pid: int) -> list[int]:
    """Processes that a child has forked and that still run."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def first_fork(child: ConfinedChild) -> int:
    wait_until(lambda: forks_of(child.pid))
    return forks_of(child.pid)[0]


def wait_until(holds) -> None:
    end = perf_counter() + 5
    while not holds():
        assert perf_counter() < end
        Flag().wait(0.02)
