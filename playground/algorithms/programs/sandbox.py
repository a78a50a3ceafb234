"""Programs that a model wrote, run behind two walls, each of which is enough alone.

The first is `confined.policy`: a list of what a program may be written with. The second is `confined.kernel`: each run
has a process of its own that, before it looks at the program, closes all files but the pipe for its results, limits its
memory and time, and gives up all system calls but those for memory, writing to that pipe and exiting, by a seccomp
filter.

Why seccomp: it needs no privileges, works inside containers, and denies files, network, processes and signals alike,
because whatever is not on its list ends the process. Landlock restricts files and TCP but leaves every other system
call within reach; namespaces are refused in most containers; no maintained package brings CPython for WebAssembly to a
server, and it would start far slower than the 30 ms this takes. libseccomp compiles the filter, pyseccomp calls it.

On a machine without seccomp nothing is run: `unavailable` says so in a sentence, `tries` and `call` raise NotRun.

Nobody calls this for a stranger unless the owner of a public page has said so: `Strategy.runs_programs` is how a
strategy tells that it does.
"""
from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from playground.algorithms.programs import confined
from playground.algorithms.programs.confined import syscalls
from playground.errors import Refusal

RUNNER = Path(confined.__file__).with_name("runner.py")
SECONDS = 5  # wall-clock time of one process, its start included
OUTPUT_BYTES = 1 << 18  # read from one process
REQUEST_BYTES = 1 << 20  # a program with its inputs
DEPTH = 50  # of lists and dicts in a result
AT_ONCE = 2  # processes
WAIT_SECONDS = 2  # for one of those places: whoever waits keeps a model waiting
UNCONFINED = 77  # exit code of the runner
NEEDED = "this machine cannot confine a program (that takes Linux with seccomp, libseccomp and the package pyseccomp)"

_places = threading.BoundedSemaphore(AT_ONCE)


class NotRun(Refusal):
    """A program was not run at all, so nothing is known about it. `why` is the end of the sentence."""

    def __init__(self, why: str):
        super().__init__(f"No program was run: {why}.")
        self.why = why


def tries(code: str, name: str, inputs: list) -> list[list | None]:
    """What function `name` of a program returns for each input, alone in a list; None where it fails, or the whole
    program does.

    Results come back as JSON gives them: tuples as lists, keys of dicts as strings. Takes at most SECONDS, after
    waiting at most WAIT_SECONDS for one of AT_ONCE places. Raises NotRun where this machine cannot confine a program or
    has no place for it.
    """
    if reason := unavailable():
        raise NotRun(reason)
    with _place():
        return _results(_answer(code, name, inputs), len(inputs))


def call(code: str, name: str, inputs: list) -> list[Any] | None:
    """The results for all inputs, or None if it fails for one. Raises NotRun as `tries` does."""
    found = tries(code, name, inputs)
    return [result[0] for result in found] if all(found) else None


@cache
def unavailable() -> str:
    """Why programs are not run on this machine, as the rest of a sentence; empty where they are. Tried once, with a
    process.

    A process that could not be started this time says nothing about the machine.
    """
    try:
        _answer("def probe(x):\n    return x", "probe", [1])
    except NotRun as refusal:
        return NEEDED if refusal.why == NEEDED else ""
    return ""


@contextmanager
def _place() -> Iterator[None]:
    if not _places.acquire(timeout=WAIT_SECONDS):
        raise NotRun("too many are running here, try again in a few seconds")
    try:
        yield
    finally:
        _places.release()


def _answer(code: str, name: str, inputs: list) -> bytes:
    """What the runner wrote; nothing where it ended otherwise than by exiting with 0. Raises NotRun."""
    request = _request(code, name, inputs)
    if len(request) > REQUEST_BYTES:
        return b""
    try:
        with os.fdopen(os.memfd_create("request"), "w+b") as file:
            file.write(request)
            file.seek(0)
            return _run(file)
    except OSError as reason:
        raise NotRun(f"no process could be started for it ({reason.strerror}), try again later") from None


def _request(code: str, name: str, inputs: list) -> bytes:
    try:
        allowed = syscalls.compiled().hex()
    except syscalls.NoSeccomp:
        raise NotRun(NEEDED) from None
    return json.dumps({"filter": allowed, "code": code, "name": name, "inputs": inputs}).encode()


def _run(request) -> bytes:
    """One process, which is gone when this returns; it has no environment and no other files of ours."""
    command = [sys.executable, "-I", "-S", "-W", "ignore", str(RUNNER)]
    deadline = time.monotonic() + SECONDS
    with subprocess.Popen(command, stdin=request, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, cwd="/",
                          start_new_session=True, bufsize=0) as process:
        try:
            output = _read(process.stdout.fileno(), deadline)
        finally:
            process.kill()
    if process.returncode == UNCONFINED:
        raise NotRun(NEEDED)
    return output if process.returncode == 0 else b""


def _read(pipe: int, deadline: float) -> bytes:
    """All that is written to a pipe before it is closed; nothing where that takes too long or is too much."""
    poll, output = select.poll(), b""
    poll.register(pipe, select.POLLIN)
    while len(output) <= OUTPUT_BYTES and (left := deadline - time.monotonic()) > 0 and poll.poll(left * 1000):
        chunk = os.read(pipe, OUTPUT_BYTES)
        if not chunk:
            return output
        output += chunk
    return b""


def _results(output: bytes, count: int) -> list[list | None]:
    """Results of `count` inputs from what a process wrote, which is trusted in nothing: all None where it is something
    else.
    """
    try:
        found = json.loads(output)
    except (ValueError, RecursionError):
        return [None] * count
    fits = isinstance(found, list) and len(found) == count
    return [result if _is_result(result) else None for result in found] if fits else [None] * count


def _is_result(result: Any) -> bool:
    return isinstance(result, list) and len(result) == 1 and _is_shallow(result)


def _is_shallow(value: Any) -> bool:
    """Whether lists and dicts are nested no deeper than DEPTH, so that anyone may compare, copy or print them."""
    level = [value]
    for _ in range(DEPTH):
        level = [inner for outer in level if isinstance(outer, (list, dict))
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return not level
