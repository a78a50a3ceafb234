"""The process in which constraints are compiled: it keeps tokenizers warm and forks once for every constraint.

    python -m playground.engine.grammar_server FD

FD is a stream socket. Each byte on it is an order and brings along one end of a socket on which that order is read and
answered: TOKENIZER adds a tokenizer, COMPILE forks a process that compiles one constraint. The fork has limits of
processor time, wall time, memory and stack that the kernel enforces, even inside native code: one that breaks them dies
without an answer, and neither this process nor the one that asked is touched. It opens no file and starts no process.
It ends when FD is closed.
"""
from __future__ import annotations

import fcntl
import gc
import os
import resource
import signal
import socket
import sys
from typing import Any

from llguidance import LLTokenizer

from playground.engine import grammar_limits as limits
from playground.engine.grammar_compiler import compile_grammar
from playground.engine.grammar_wire import BEGUN, TABLES, TOKENIZER, UNKNOWN, receive, send
from playground.engine.lalr import tables
from playground.errors import Refusal

Tokenizers = dict[str, LLTokenizer | str]
"""By the digest of its description; one that cannot be built is the reason."""


def main(orders: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; whoever asked closes the socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    tokenizers: Tokenizers = {}
    gc.freeze()
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
        if not order:
            return
        with socket.socket(fileno=descriptors[0]) as line:
            if order == TOKENIZER:
                _learn(line, tokenizers)
            elif os.fork() == 0:
                orders.close()
                _serve(line, tokenizers)


def _learn(line: socket.socket, tokenizers: Tokenizers) -> None:
    try:
        digest, description, width, ends = receive(line, 1 << 30)
        while len(tokenizers) >= limits.TOKENIZERS:
            del tokenizers[next(iter(tokenizers))]
        tokenizers[digest] = LLTokenizer(description, n_vocab=width, eos_token=ends)
        gc.freeze()  # a fork leaves these pages shared
    except (EOFError, OSError, ValueError):
        return


def _serve(line: socket.socket, tokenizers: Tokenizers) -> None:
    """In the fork: read one order, answer it, end."""
    try:
        line.settimeout(limits.WALL_SECONDS)
        digest, kind, source = receive(line, 1 << 24)
        _end_with(line, True)
        send(line, BEGUN)
        _confine()
        answer = _answer(tokenizers, digest, kind, source)
        _end_with(line, False)
        send(line, answer)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _end_with(line: socket.socket, does: bool) -> None:
    """Whether the process ends when the other side hangs up: Linux then sends it SIGIO, whose default action kills."""
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(line, fcntl.F_GETFL)
    fcntl.fcntl(line, fcntl.F_SETFL, flags | os.O_ASYNC if does else flags & ~os.O_ASYNC)


def _confine() -> None:
    """Limits that hold inside native code; the timers kill the process by the default action of their signals."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of the native code shows in the missing answer
    signal.setitimer(signal.ITIMER_REAL, limits.WALL_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, limits.CPU_SECONDS)
    for which, bound in (
        ("AS", _address_space() + limits.MEMORY_BYTES),
        ("STACK", limits.STACK_BYTES),
        ("CORE", 0),
        ("FSIZE", 0),
        ("NPROC", 0),
    ):
        _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{which}"))
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(getattr(resource, f"RLIMIT_{which}"), (bound, bound))


def _address_space() -> int:
    """Bytes of address space this process has; macOS does not say, and does not enforce the limit either."""
    try:
        with open("/proc/self/statm", encoding="ascii") as pages:
            return int(pages.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 36


def _answer(tokenizers: Tokenizers, digest: str, kind: str, source: str) -> dict[str, Any]:
    try:
        if kind == TABLES:
            return tables(source)
        if digest not in tokenizers:
            return {"error": UNKNOWN}
        return compile_grammar(tokenizers[digest], kind, source)
    except Refusal as refused:
        return {"refusal": str(refused), "about": refused.about}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except MemoryError:
        return {"error": f"it takes more than {limits.MEMORY_BYTES >> 20} MB of memory"}
    except Exception as reason:  # a source that the compiler did not expect is bad input, whatever it stumbled over
        return {"error": f"it is not well-formed ({type(reason).__name__})"}


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
