"""Run programs written by a model behind two barriers, either of which is meant to be sufficient alone.

The first is `confined.policy`, an allowlist of syntax, builtins and methods. The second is `confined.kernel`: each run
has its own process. Before it reads the program, the process closes all files except the pipe for its results, limits
its memory and time, and loads a seccomp filter that allows only system calls for memory, writing to that pipe and
exiting.

Why seccomp: it needs no privileges, works inside containers, and denies files, network, processes and signals alike,
because any call that is not on its list ends the process. Landlock restricts files and TCP but no other system call.
Namespaces are denied in most containers. No maintained package offers CPython on WebAssembly for servers, and it would
start far slower than the 30 ms this takes. libseccomp compiles the filter, pyseccomp is its Python binding.

On a machine without seccomp nothing is run: `unavailable` gives the reason, `tries` and `call` raise NotRun.

On a public page this is called only if its owner has allowed it; `Strategy.runs_programs` declares that a strategy
needs it.
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
SECONDS = 5  # wall-clock time of one process, including its start
OUTPUT_BYTES = 1 << 18  # read from one process
REQUEST_BYTES = 1 << 20  # a program with its inputs
DEPTH = 50  # of lists and dicts in a result
AT_ONCE = 2  # processes
WAIT_SECONDS = 2  # for one of those processes; the model waits meanwhile
UNCONFINED = 77  # exit code of the runner
NEEDED = "this machine cannot confine a program (that takes Linux with seccomp, libseccomp and the package pyseccomp)"

_places = threading.BoundedSemaphore(AT_ONCE)


class NotRun(Refusal):
    """A program was not run, so nothing is known about its results. `why` is the reason, without a full stop."""

    def __init__(self, why: str):
        super().__init__(f"No program was run: {why}.")
        self.why = why


def tries(code: str, name: str, inputs: list) -> list[list | None]:
    """Call function `name` of a program with each input; returns [result] for each, or None if the call fails.

    Results are converted to JSON and back: tuples become lists, keys of dicts strings. Takes at most SECONDS, after
    waiting at most WAIT_SECONDS for one of AT_ONCE processes. Raises NotRun if this machine cannot confine a program
    or too many are running.
    """
    if reason := unavailable():
        raise NotRun(reason)
    with _place():
        return _results(_answer(code, name, inputs), len(inputs))


def call(code: str, name: str, inputs: list) -> list[Any] | None:
    """The results for all inputs, or None if one call fails. Raises NotRun as `tries` does."""
    found = tries(code, name, inputs)
    return [result[0] for result in found] if all(found) else None


@cache
def unavailable() -> str:
    """Why programs cannot be run on this machine, without a full stop; empty if they can. Tested once, with a process.

    If the process cannot be started this time, nothing is known about the machine, and the answer is empty.
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
    """The output of the runner; empty unless it exited with 0. Raises NotRun."""
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
    """Run one process, without environment and inherited files, and wait for its end."""
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
    """Everything written to a pipe until it is closed; empty if that takes too long or is too much."""
    poll, output = select.poll(), b""
    poll.register(pipe, select.POLLIN)
    while len(output) <= OUTPUT_BYTES and (left := deadline - time.monotonic()) > 0 and poll.poll(left * 1000):
        chunk = os.read(pipe, OUTPUT_BYTES)
        if not chunk:
            return output
        output += chunk
    return b""


def _results(output: bytes, count: int) -> list[list | None]:
    """Results of `count` inputs from the output of a process, which is not trusted; all None if it is malformed."""
    try:
        found = json.loads(output)
    except (ValueError, RecursionError):
        return [None] * count
    fits = isinstance(found, list) and len(found) == count
    return [result if _is_result(result) else None for result in found] if fits else [None] * count


def _is_result(result: Any) -> bool:
    return isinstance(result, list) and len(result) == 1 and _is_shallow(result)


def _is_shallow(value: Any) -> bool:
    """Whether lists and dicts are nested at most DEPTH deep, so that they can be compared, copied and printed."""
    level = [value]
    for _ in range(DEPTH):
        level = [inner for outer in level if isinstance(outer, (list, dict))
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return not level
