"""Confinement of the process that runs a program. The process applies it to itself before it reads the program.

It cannot be undone, applies to everything the process does afterwards, and does not depend on the text of the program.
`confine` raises OSError if the kernel denies any part of it.
"""
from __future__ import annotations

import ctypes
import os
import resource
import signal

CPU_SECONDS = 1
WALL_SECONDS = 5
MEMORY_BYTES = 1 << 28
RESULTS = 1  # the pipe that results are written to, the only file descriptor that stays open

PR_SET_SECCOMP, SECCOMP_MODE_FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38  # linux/prctl.h, linux/seccomp.h
BPF_INSTRUCTION_BYTES = 8


class FilterProgram(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = [("instructions", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def confine(syscall_filter: bytes) -> None:
    """Give up everything except memory, time and one pipe. Raises OSError on failure; then no program may be run."""
    close_files()
    limit_resources()
    install(syscall_filter)
    verify()


def close_files() -> None:
    os.closerange(0, RESULTS)
    os.closerange(RESULTS + 1, 1 << 16)


def limit_resources() -> None:
    """Set limits that end the process (CPU and wall-clock time) or make a call fail (memory, files, processes)."""
    for limit, most in (
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


def install(syscall_filter: bytes) -> None:
    """Load a seccomp filter of BPF instructions. The process has one thread, and the filter lets it start no other."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    program = FilterProgram(len(syscall_filter) // BPF_INSTRUCTION_BYTES, syscall_filter)
    requests = (PR_SET_NO_NEW_PRIVS, 1), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))
    for request in requests:
        if libc.prctl(*request, *[0] * (5 - len(request))) != 0:
            raise OSError(ctypes.get_errno(), "seccomp refused")


def verify() -> None:
    """Raise OSError unless the filter is in force.

    Without it, opening a file succeeds or fails with another error, because no file descriptor is left.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except PermissionError:
        return
    raise OSError("the seccomp filter has no effect")
