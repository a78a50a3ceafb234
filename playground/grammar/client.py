"""Asks the compiler process (`grammar.work`, in a confined child) for compiled constraints, and keeps them."""
from __future__ import annotations

import atexit
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from threading import Lock
from typing import Any

from playground.confined.child import BrokenLimit, Busy, Cancelled, ChildLesson, ConfinedChild, ConfinedTask
from playground.errors import Refusal
from playground.grammar import limits
from playground.grammar.kinds import KINDS
from playground.grammar.limits import TABLES

WORK = "playground.grammar.work"
BROKEN = {
    "time": (
        f"it takes more than {limits.CPU_SECONDS:g} s of processor time, or {limits.WALL_SECONDS:g} s in all, to"
        " compile"
    ),
    "memory": "it is nested too deeply or takes too much memory to compile",
}
NAMES = {**KINDS, TABLES: "Lark grammar"}


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as its JSON description, the width of the model's logits, and its end tokens."""

    description: str
    width: int
    ends: tuple[int, ...]

    def lesson(self) -> list[Any]:
        """What the compiler process learns of it."""
        return [self.description, self.width, list(self.ends) or None]

    @property
    def digest(self) -> str:
        return blake2b(
            repr((self.description, self.width, self.ends)).encode("utf-8", "surrogatepass"), digest_size=16
        ).hexdigest()


BYTES = Vocabulary("byte", 262, ())  # llguidance's own: 256 bytes and its special tokens


class Compiler:
    """One compiler process. Any number of threads may ask it; as many constraints are compiled at a time as it has
    places, each in a fork of its own.
    """

    def __init__(self) -> None:
        self.child = ConfinedChild(WORK, limits.BOUNDS)

    def compile(
        self,
        kind: str,
        source: str,
        vocabulary: Vocabulary | None = None,
        digest: str = "",
        task: ConfinedTask | None = None,
    ) -> dict[str, Any]:
        """The compiled constraint as plain data; raises Refusal where it breaks a limit or cannot be used, and
        Cancelled where `task` was cancelled.
        """
        if not hasattr(os, "fork"):
            raise Refusal(
                "Grammars are compiled in a forked process, which this system does not have: use Linux or macOS, or"
                " switch the constraint off."
            )
        lesson = ChildLesson(digest, vocabulary.lesson) if vocabulary else None
        try:
            answer = self.child.ask([kind, source], wait_seconds=limits.SLOT_SECONDS, task=task, lesson=lesson)
        except Busy:
            raise Refusal("Other grammars are being compiled and take long: try again in a few seconds.") from None
        except BrokenLimit as broken:
            if broken.reason == "start":
                raise Refusal("The process that compiles grammars does not start: try again later.") from None
            answer = {"error": BROKEN[broken.reason]}
        return _unpacked(kind, answer)

    def close(self) -> None:
        """End the process and wait for it."""
        self.child.close()

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self.child.pid


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


def check_constraint(kind: str, source: str, task: ConfinedTask) -> None:
    """Raise Refusal for a constraint that cannot be used, without a model: its tokens are the bytes.

    The same text is compiled once. Raises Cancelled where `task` was cancelled.
    """
    check_source(kind, source)
    while True:
        try:
            _checked().get(digest_of(kind, source), lambda: _compiled_for_bytes(kind, source, task))
            return
        except Cancelled:
            task.confirm()  # otherwise another check of the same text was cancelled, for which this one had waited


def _compiled_for_bytes(kind: str, source: str, task: ConfinedTask) -> int:
    compiler().compile(kind, source, BYTES, BYTES.digest, task)
    return 0


@cache
def _checked() -> ContentCache:
    return ContentCache(limits.CHECKED, 1, lambda weightless: weightless)


def compiled_tables(source: str) -> dict[str, Any]:
    """The tables of a grammar for SynCode (`grammar/lark/lalr.py`); raises Refusal."""
    limits.check_text(NAMES[TABLES], source)
    return _tables().get(digest_of(source), lambda: compiler().compile(TABLES, source))


@cache
def _tables() -> ContentCache:
    return ContentCache(
        limits.TABLES_KEPT, limits.GRAMMARS_BYTES, lambda data: sum(len(packed) for packed, _ in data["automata"])
    )


def digest_of(*parts: str) -> str:
    """A short key for texts of any length."""
    return blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _unpacked(kind: str, answer: dict[str, Any]) -> dict[str, Any]:
    if "refusal" in answer:
        raise Refusal(answer["refusal"], answer.get("about", ""))
    if "error" in answer:
        raise Refusal(f"The {NAMES[kind]} cannot be used: {answer['error']}. Make it simpler.")
    return answer
