"""Asks a confined child (`confined.server`) to work on what a visitor wrote: parse it, analyse it, render it.

The child is started when it is first needed, and again when it died, was stopped or does not respond.
"""
from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import BoundedSemaphore, Lock
from time import monotonic
from typing import Any, NamedTuple

from playground.confined.task_bounds import TaskBounds
from playground.confined.wire import ASK, TEACH, UNKNOWN, packed, receive

START_SECONDS = 30.0  # until a child forks that has just been started or taught, on a loaded machine
RESPONSE_SECONDS = 5.0  # until one forks that was waiting
PULSE = 0.1  # seconds after which it is checked again whether the child is alive
SPARE_SECONDS = 1.0  # beyond the wall time of a task, after which a fork that was stopped is killed
CLOSING_SECONDS = 2.0
TRIES = 3  # a child that was killed since the last order, or has dropped a lesson since, is asked again


class Cancelled(Exception):
    """The task was cancelled by whoever asked for it."""


class Busy(Exception):
    """Other tasks have taken all places for as long as the task could wait."""


class BrokenLimit(Exception):
    """The task ended without an answer. `reason` is "time", or "memory" for memory and stack, or "start" if the child
    could not be started.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class _Gone(Exception):
    """The child has died or does not respond."""


class ChildLesson(NamedTuple):
    """What the child has to learn before a task, and keeps: `content` makes it, `key` is a digest of it."""

    key: str
    content: Callable[[], Any]


class ConfinedTask:
    """A task that is under way; another thread may cancel it."""

    def __init__(self) -> None:
        self._lock, self.cancelled = Lock(), False
        self._line: socket.socket | None = None

    def follow(self, line: socket.socket) -> None:
        """Take the line on which a fork works; raises Cancelled if the task was cancelled before."""
        with self._lock:
            self._line = line
        self.confirm()

    def confirm(self) -> None:
        """Raise Cancelled if the task was cancelled."""
        if self.cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Hang up, which ends the fork."""
        with self._lock:
            self.cancelled = True
            if self._line and self._line.fileno() >= 0:
                with suppress(OSError):  # the fork has hung up
                    self._line.shutdown(socket.SHUT_RDWR)


@dataclass
class _Process:
    """The running child."""

    popen: subprocess.Popen
    orders: socket.socket
    patience: float = START_SECONDS  # until it forks

    def confirm(self) -> None:
        """Raise _Gone if it has ended or is stopped; a process that is stopped would never answer."""
        if self.popen.poll() is not None or _is_stopped(self.popen.pid):
            raise _Gone

    def order(self, order: bytes) -> socket.socket:
        """Give an order; returns the line on which it is read and answered."""
        ours, theirs = socket.socketpair()
        with theirs:
            with suppress(OSError):  # the process is gone: the line is at its end
                socket.send_fds(self.orders, [order], [theirs.fileno()])
        ours.settimeout(PULSE)
        return ours

    def deliver(self, line: socket.socket, message: Any, patience: float) -> None:
        """Send a message. Raises _Gone."""
        rest = memoryview(packed(message))
        while rest:
            rest = rest[self.attempt(partial(line.send, rest), patience):]

    def attempt(self, act: Callable[[], Any], patience: float) -> Any:
        """The result of an act on a line, tried while the process responds. Raises _Gone."""
        end = monotonic() + patience
        while True:
            try:
                return act()
            except TimeoutError:
                self.confirm()
                if monotonic() > end:
                    raise _Gone from None
            except OSError:
                raise _Gone from None

    def end(self) -> None:
        """Close its orders, at which it ends, or kill it if it does not; wait for it."""
        self.orders.close()
        with suppress(_Gone, subprocess.TimeoutExpired):
            self.confirm()
            self.popen.wait(CLOSING_SECONDS)
        self.popen.kill()
        self.popen.wait()


class ConfinedChild:
    """One child, whose work is a module such as `grammar.work`. Any number of threads may ask it; `bounds.at_once`
    tasks run at a time, each in a fork of its own.
    """

    def __init__(self, work: str, bounds: TaskBounds):
        self._work, self.bounds = work, bounds
        self._lock = Lock()  # held while the process is started or given an order, never while a task runs
        self._places = BoundedSemaphore(bounds.at_once)
        self._process: _Process | None = None
        self._known: OrderedDict[str, None] = OrderedDict()  # lessons the process has, oldest first

    def ask(
        self,
        order: Any,
        *,
        wait_seconds: float,
        cpu_seconds: float = math.inf,
        task: ConfinedTask | None = None,
        lesson: ChildLesson | None = None,
    ) -> Any:
        """The answer of the child to an order, both plain data. It may be waited for: call it from a thread of its own.

        `cpu_seconds` may lower the limit for this task. Raises Busy if no place is free within `wait_seconds`,
        BrokenLimit, and Cancelled where `task` was cancelled.
        """
        task = task or ConfinedTask()
        self._wait_for_place(wait_seconds, task)
        limit = min(cpu_seconds, self.bounds.cpu_seconds)
        try:
            return self._answered([lesson.key if lesson else "", limit, order], lesson, task)
        finally:
            self._places.release()

    def _wait_for_place(self, seconds: float, task: ConfinedTask) -> None:
        end = monotonic() + seconds
        while not self._places.acquire(timeout=max(0.0, min(PULSE, end - monotonic()))):
            task.confirm()
            if monotonic() >= end:
                raise Busy

    def close(self) -> None:
        """End the process and wait for it."""
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._process.popen.pid if self._process else None

    def _answered(self, order: list, lesson: ChildLesson | None, task: ConfinedTask) -> Any:
        for _ in range(TRIES):
            process = None
            try:
                process, line = self._ordered(lesson)
                with line:
                    task.follow(line)
                    fork = process.attempt(partial(_begun, line), process.patience)
                    process.patience = RESPONSE_SECONDS
                    process.deliver(line, order, RESPONSE_SECONDS)
                    answer = self._heard(line, fork, order[1], task)
            except _Gone:
                task.confirm()
                self._forget(process)
                continue
            if answer != UNKNOWN:
                return answer
            if lesson:
                with self._lock:
                    self._known.pop(lesson.key, None)
        raise BrokenLimit("start")

    def _heard(self, line: socket.socket, fork: int, cpu_seconds: float, task: ConfinedTask) -> Any:
        """The answer of a fork. One that was stopped holds the line: it is killed after its time."""
        start = monotonic()
        line.settimeout(self.bounds.wall_seconds + SPARE_SECONDS)
        try:
            return receive(line, self.bounds.answer_bytes)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.kill(fork, signal.SIGKILL)
            raise BrokenLimit("time") from None
        except (EOFError, OSError, ValueError):
            task.confirm()
            took_long = monotonic() - start >= 0.9 * min(cpu_seconds, self.bounds.wall_seconds)
            raise BrokenLimit("time" if took_long else "memory") from None

    def _forget(self, process: _Process | None) -> None:
        """The process takes no orders: the next one starts another."""
        with self._lock:
            if self._process and process in (None, self._process):
                self._process.popen.kill()
                self._end()

    def _ordered(self, lesson: ChildLesson | None) -> tuple[_Process, socket.socket]:
        """The process, and the line on which a fork of it waits for its order. Raises _Gone."""
        with self._lock:
            process = self._process
            if process is None or process.popen.poll() is not None:
                process = self._start()
            if lesson and lesson.key not in self._known:
                self._teach(process, lesson)
            return process, process.order(ASK)

    def _teach(self, process: _Process, lesson: ChildLesson) -> None:
        with process.order(TEACH) as line:
            process.deliver(line, [lesson.key, lesson.content()], START_SECONDS)
        process.patience = START_SECONDS
        self._known[lesson.key] = None
        while len(self._known) > self.bounds.lessons:
            self._known.popitem(last=False)

    def _start(self) -> _Process:
        self._end()
        orders, theirs = socket.socketpair()
        orders.settimeout(PULSE)
        with theirs:
            command = [sys.executable, "-m", "playground.confined.server", str(theirs.fileno()), self._work]
            environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # nothing else: no token, no key
            popen = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C and Ctrl-Z in a terminal are for the page
            )
        self._process = process = _Process(popen, orders)
        return process

    def _end(self) -> None:
        if self._process:
            self._process.end()
        self._process = None
        self._known.clear()


def _begun(line: socket.socket) -> int:
    """The process id of the fork that has taken an order. Raises TimeoutError while there is none."""
    if not line.recv(1, socket.MSG_PEEK):
        raise ConnectionResetError
    return receive(line, 64)


def _is_stopped(pid: int) -> bool:
    """Whether a child of this process is stopped, as by SIGSTOP; systems without waitid do not say."""
    if not hasattr(os, "waitid"):
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False
