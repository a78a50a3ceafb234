"""The confined child: a warm process that forks once for every task, behind walls that the kernel keeps up.

    python -m playground.confined.server FD MODULE

MODULE does the work. It has `BOUNDS`, and three functions: `warm()` loads what all tasks need, `learn(lesson)` makes
what some of them need from what it was sent, and `answer(order, learned)` does one task, in a fork.

FD is a stream socket. Each byte on it is an order and brings along one end of a socket on which that order is read and
answered: TEACH adds a lesson, ASK forks a process for one task. The fork has limits of processor time, wall time,
memory and stack that the kernel enforces, even inside native code: one that breaks them dies without an answer, and
neither this process nor the one that asked is touched. It opens no file and starts no process. The child ends when FD
is closed.
"""
from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import sys
from collections import OrderedDict
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

from playground.confined import walls
from playground.confined.wire import TEACH, UNKNOWN, packed, receive

LESSON_BYTES = 1 << 30
ORDER_BYTES = 1 << 26
Lessons = OrderedDict[str, Any]


def main(orders: socket.socket, work: ModuleType) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked closes the socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    work.warm()
    lessons, syscalls = Lessons(), walls.syscall_filter()
    gc.freeze()
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 1, 1)
        if not order:
            return
        with socket.socket(fileno=descriptors[0]) as line:
            if order == TEACH:
                _learn(line, lessons, work)
            elif os.fork() == 0:
                _serve(line, lessons, work, syscalls)


def _learn(line: socket.socket, lessons: Lessons, work: ModuleType) -> None:
    try:
        key, lesson = receive(line, LESSON_BYTES)
        while len(lessons) >= work.BOUNDS.lessons:
            lessons.popitem(last=False)
        lessons[key] = work.learn(lesson)
        gc.freeze()  # a fork leaves these pages shared
    except (EOFError, OSError, ValueError):
        return


def _serve(line: socket.socket, lessons: Lessons, work: ModuleType, syscalls: Any) -> None:
    """In the fork: read one order, answer it, end."""
    try:
        line.settimeout(work.BOUNDS.wall_seconds)
        line.sendall(packed(os.getpid()))
        lesson, cpu_seconds, order = receive(line, ORDER_BYTES)
        line.settimeout(None)  # waiting with a time limit takes more descriptors than the walls allow
        _end_with(line)
        walls.put_up(line.fileno(), replace(work.BOUNDS, cpu_seconds=cpu_seconds), syscalls)
        answer = work.answer(order, lessons.get(lesson)) if lesson in lessons or not lesson else UNKNOWN
        fcntl.fcntl(line, fcntl.F_SETFL, 0)
        line.sendall(packed(answer))
    except BaseException:
        os._exit(1)
    os._exit(0)


def _end_with(line: socket.socket) -> None:
    """End when the other side hangs up: Linux then sends this process SIGIO, whose default action kills."""
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, fcntl.F_SETFL, os.O_ASYNC)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), import_module(sys.argv[2]))
