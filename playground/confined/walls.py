"""The walls around a task: the fork that runs it puts them up before it looks at what it was given.

No file can be opened, no process started and no connection made, since the process may open no descriptor. Where
libseccomp is installed, a filter also denies every system call but those for memory, for the time and for the line to
whoever asked; then not even the existence of a file can be found out. Time, memory and stack are bounded by the kernel.
"""
from __future__ import annotations

import fcntl
import mmap
import os
import resource
import signal
from errno import ENOENT, EPERM
from functools import cache
from typing import Any

from playground.confined.task_bounds import TaskBounds

ALLOWED = """
    read pread64 recvfrom write sendto close brk munmap mremap madvise futex getrandom clock_gettime gettimeofday time
    sched_yield getpid gettid rt_sigreturn exit exit_group
""".split()
# of files, which then do not exist: jedi and Python expect that of any path
OF_PATHS = """
    open openat openat2 stat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getcwd
""".split()


def syscall_filter() -> Any | None:
    """The filter of a task, to be loaded in its fork; None where libseccomp or its Python binding is missing."""
    try:
        import pyseccomp
        rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(EPERM))
        rules.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    except (ImportError, RuntimeError, AttributeError, OSError):
        return None
    for name in ALLOWED:
        _add(rules, pyseccomp.ALLOW, name)
    for name in OF_PATHS:
        _add(rules, pyseccomp.ERRNO(ENOENT), name)
    no_code = pyseccomp.Arg(2, pyseccomp.MASKED_EQ, mmap.PROT_EXEC, 0)
    anonymous = pyseccomp.Arg(3, pyseccomp.MASKED_EQ, mmap.MAP_ANONYMOUS, mmap.MAP_ANONYMOUS)
    _add(rules, pyseccomp.ALLOW, "mmap", no_code, anonymous)
    _add(rules, pyseccomp.ALLOW, "mprotect", no_code)
    _add(rules, pyseccomp.ALLOW, "fcntl", pyseccomp.Arg(1, pyseccomp.EQ, fcntl.F_SETFL))
    return rules


def _add(rules: Any, action: int, name: str, *arguments: Any) -> None:
    try:
        rules.add_rule(action, name, *arguments)
    except (RuntimeError, OSError):  # a call that this architecture or this libseccomp does not have stays denied
        return


def put_up(line: int, bounds: TaskBounds, syscalls: Any | None) -> None:
    """Confine this process for good. Only the descriptor `line`, and the meter of its memory, stay open."""
    memory = _address_space() + bounds.memory_bytes
    _close_all_but({line, *_open_meter()})
    os.nice(bounds.niceness)
    signal.setitimer(signal.ITIMER_REAL, bounds.wall_seconds)  # their signals end the process
    signal.setitimer(signal.ITIMER_PROF, bounds.cpu_seconds)
    for which, bound in (
        ("CPU", int(bounds.cpu_seconds) + 1),
        ("AS", memory),
        ("STACK", bounds.stack_bytes),
        ("CORE", 0),
        ("FSIZE", 0),
        ("NPROC", 0),
        ("NOFILE", 0),
    ):
        _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{which}"))
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(getattr(resource, f"RLIMIT_{which}"), (bound, bound))
    if syscalls is not None:
        syscalls.load()


def _open_meter() -> list[int]:
    try:
        return [_meter(os.getpid())]
    except OSError:
        return []


def _close_all_but(kept: set[int]) -> None:
    first = 0
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, 1 << 16)


def resident_bytes() -> int:
    """Bytes of memory this process has; 0 where the system does not say."""
    return _statm(1)


def _address_space() -> int:
    """Bytes of address space this process has; macOS does not say, and does not enforce the limit either."""
    return _statm(0) or 1 << 36


def _statm(field: int) -> int:
    try:
        return int(os.pread(_meter(os.getpid()), 256, 0).split()[field]) * resource.getpagesize()
    except OSError:
        return 0


@cache
def _meter(process: int) -> int:
    """The descriptor that says how much memory a process has: it is opened once, before no file can be."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
