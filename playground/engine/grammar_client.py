"""Asks the compiler process (`grammar_server`) for compiled constraints; starts it when it is first needed, and again
when it died.
"""
from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from threading import BoundedSemaphore, Lock
from time import monotonic
from typing import Any

from playground.engine import grammar_limits as limits
from playground.engine.grammar_compiler import KINDS
from playground.engine.grammar_wire import BEGUN, COMPILE, TABLES, TOKENIZER, UNKNOWN, receive, send
from playground.errors import Refusal

CLOSING_SECONDS = 2.0
TRIES = 3  # a process that was killed since the last order, or has dropped the tokenizer since, is asked again
NAMES = {**KINDS, TABLES: "Lark grammar"}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as its JSON description, the width of the model's logits, and its end tokens."""

    description: str
    width: int
    ends: tuple[int, ...]

    @property
    def digest(self) -> str:
        return blake2b(
            repr((self.description, self.width, self.ends)).encode("utf-8", "surrogatepass"), digest_size=16
        ).hexdigest()


BYTES = Vocabulary("byte", 262, ())  # llguidance's own: 256 bytes and its special tokens


class Superseded(Exception):
    """The check of a text was cancelled, since there is a newer one."""


class Check:
    """A check of a constraint that is under way; another thread may cancel it."""

    def __init__(self) -> None:
        self._lock, self._line, self.cancelled = Lock(), None, False

    def follow(self, line: socket.socket) -> None:
        """Take the line on which a fork compiles; raises Superseded if the check was cancelled before."""
        with self._lock:
            self._line = line
        self.confirm()

    def confirm(self) -> None:
        """Raise Superseded if the check was cancelled."""
        if self.cancelled:
            raise Superseded

    def cancel(self) -> None:
        """Hang up, which ends the fork."""
        with self._lock:
            self.cancelled = True
            if self._line and self._line.fileno() >= 0:
                self._line.shutdown(socket.SHUT_RDWR)


class Compiler:
    """One compiler process. Any number of threads may ask it; SLOTS constraints are compiled at a time, each in a fork
    of its own.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # held while the process is started or given an order, never while it compiles
        self._slots = BoundedSemaphore(limits.SLOTS)
        self._process: subprocess.Popen | None = None
        self._orders: socket.socket | None = None
        self._known: OrderedDict[str, None] = OrderedDict()  # tokenizers the process has, oldest first

    def compile(
        self,
        kind: str,
        source: str,
        vocabulary: Vocabulary | None = None,
        digest: str = "",
        check: Check | None = None,
    ) -> dict[str, Any]:
        """The compiled constraint as plain data; raises Refusal where it breaks a limit or cannot be used, and
        Superseded where `check` was cancelled.
        """
        if not hasattr(os, "fork"):
            raise Refusal(
                "Grammars are compiled in a forked process, which this system does not have: use Linux or macOS, or"
                " switch the constraint off."
            )
        if not self._slots.acquire(timeout=limits.SLOT_SECONDS):
            raise Refusal("Other grammars are being compiled and take long: try again in a few seconds.")
        try:
            return _unpacked(kind, self._asked([digest, kind, source], vocabulary, check or Check()))
        finally:
            self._slots.release()

    def close(self) -> None:
        """End the process and wait for it."""
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._process.pid if self._process else None

    def _asked(self, order: list[str], vocabulary: Vocabulary | None, check: Check) -> dict[str, Any]:
        """The answer; a fork that died without one leaves an error that says which limit it met."""
        digest = order[0]
        for _ in range(TRIES):
            process, line = self._ordered(vocabulary, digest)
            with line:
                check.follow(line)
                begun, start = self._talk(line, order), monotonic()
                answer = self._heard(line) if begun else None
            check.confirm()
            if not begun:
                self._forget(process)
            elif answer == {"error": UNKNOWN}:
                self._unlearn(digest)
            else:
                return answer or {"error": _broken_limit(monotonic() - start)}
        return {"error": "the compiler process does not start, so try again later"}

    def _talk(self, line: socket.socket, order: list) -> bool:
        """Send an order; whether a fork has it."""
        line.settimeout(limits.START_SECONDS)
        try:
            send(line, order)
        except OSError:
            return False
        return self._heard(line) == BEGUN

    def _heard(self, line: socket.socket) -> Any:
        """The next message; None where the fork is gone."""
        try:
            return receive(line, limits.ANSWER_BYTES)
        except (EOFError, OSError, ValueError):
            return None

    def _forget(self, process: subprocess.Popen) -> None:
        """The process takes no orders: the next one starts another."""
        with self._lock:
            if self._process is process:
                process.kill()
                self._end()

    def _unlearn(self, digest: str) -> None:
        with self._lock:
            self._known.pop(digest, None)

    def _ordered(self, vocabulary: Vocabulary | None, digest: str) -> tuple[subprocess.Popen, socket.socket]:
        """The process, and the line on which a fork of it waits for its source."""
        with self._lock:
            if not self._alive():
                self._start()
            if vocabulary and digest not in self._known:
                self._teach(vocabulary, digest)
            return self._process, self._order(COMPILE)

    def _teach(self, vocabulary: Vocabulary, digest: str) -> None:
        with self._order(TOKENIZER) as line:
            line.settimeout(limits.START_SECONDS)
            try:
                send(line, [digest, vocabulary.description, vocabulary.width, list(vocabulary.ends) or None])
            except OSError:
                return  # the process is gone, as whoever asks next finds
        self._known[digest] = None
        while len(self._known) > limits.TOKENIZERS:
            self._known.popitem(last=False)

    def _order(self, order: bytes) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._orders, [order], [theirs.fileno()])
            except OSError:
                pass  # the process is gone: the line is at its end
        return ours

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        self._end()
        self._orders, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "playground.engine.grammar_server", str(theirs.fileno())]
            environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # nothing else: no token, no key
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
            )

    def _end(self) -> None:
        if self._orders:
            self._orders.close()
        if self._process:
            try:
                self._process.wait(CLOSING_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._orders = None
        self._known.clear()


class ContentCache:
    """Results by what they were made of, the least recently used dropped; what two threads ask for at once is made
    once.

    `weight` says how many bytes a result takes. A failure is not kept, and reaches everyone who waited for it.
    """

    def __init__(self, entries: int, most: int, weight: Callable[[Any], int]):
        self._lock, self._entries, self._most, self._weight = Lock(), entries, most, weight
        self._kept: OrderedDict[Hashable, Future] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        with self._lock:
            future, first = self._kept.get(key), False
            if future is None:
                future = self._kept[key] = Future()
                first = True
            self._kept.move_to_end(key)
        if first:
            self._fill(key, future, make)
        result = future.result()
        with self._lock:
            self._trim()  # results may have grown since
        return result

    def _fill(self, key: Hashable, future: Future, make: Callable[[], Any]) -> None:
        try:
            future.set_result(make())
        except BaseException as reason:
            with self._lock:
                self._kept.pop(key, None)
            future.set_exception(reason)

    def _trim(self) -> None:
        done = [key for key, future in self._kept.items() if future.done()]
        total = sum(self._weight(self._kept[key].result()) for key in done)
        for key in done[:-1]:
            if len(self._kept) <= self._entries and total <= self._most:
                return
            total -= self._weight(self._kept.pop(key).result())


@cache
def compiler() -> Compiler:
    """The compiler of this process; it ends with it."""
    made = Compiler()
    atexit.register(made.close)
    return made


def check_source(kind: str, source: str) -> None:
    """Raise Refusal for a constraint that is empty or too long, before it is compiled."""
    if not source.strip():
        raise Refusal(f"The {NAMES[kind]} is empty: write one, or switch the constraint off.")
    limits.check_text(NAMES[kind], source)
    if kind == "choice":
        limits.check_options(source)


def check_constraint(kind: str, source: str, check: Check) -> None:
    """Raise Refusal for a constraint that cannot be used, without a model: its tokens are the bytes.

    The same text is compiled once. Raises Superseded where `check` was cancelled.
    """
    check_source(kind, source)
    while True:
        try:
            _checked().get(digest_of(kind, source), lambda: _compiled_for_bytes(kind, source, check))
            return
        except Superseded:
            check.confirm()  # otherwise another check of the same text was cancelled, for which this one had waited


def _compiled_for_bytes(kind: str, source: str, check: Check) -> int:
    compiler().compile(kind, source, BYTES, BYTES.digest, check)
    return 0


@cache
def _checked() -> ContentCache:
    return ContentCache(limits.CHECKED, 1, lambda weightless: weightless)


def compiled_tables(source: str) -> dict[str, Any]:
    """The tables of a grammar for SynCode (`engine/lalr.py`); raises Refusal."""
    limits.check_text(NAMES[TABLES], source)
    return _tables().get(digest_of(source), lambda: compiler().compile(TABLES, source))


@cache
def _tables() -> ContentCache:
    return ContentCache(
        limits.TABLES, limits.GRAMMARS_BYTES, lambda data: sum(len(packed) for packed, _ in data["automata"])
    )


def digest_of(*parts: str) -> str:
    """A short key for texts of any length."""
    return blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _broken_limit(seconds: float) -> str:
    if seconds >= 0.9 * min(limits.CPU_SECONDS, limits.WALL_SECONDS):
        return (
            f"it takes more than {limits.CPU_SECONDS:g} s of processor time, or {limits.WALL_SECONDS:g} s in all, to"
            " compile"
        )
    return "it is nested too deeply or takes too much memory to compile"


def _unpacked(kind: str, answer: dict[str, Any]) -> dict[str, Any]:
    if "refusal" in answer:
        raise Refusal(answer["refusal"], answer.get("about", ""))
    if "error" in answer:
        raise Refusal(f"The {NAMES[kind]} cannot be used: {answer['error']}. Make it simpler.")
    return answer
