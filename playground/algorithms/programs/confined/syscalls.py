"""The system calls that a process running a program may make, compiled to a filter by libseccomp.

This runs once, in the parent process; the child gets the compiled filter.
"""
from __future__ import annotations

import errno
import mmap
import tempfile
from functools import cache

MEMORY = ("brk", "munmap", "mremap", "madvise")
ENDING = ("exit", "exit_group")
# The parser opens files to quote the line of a syntax error: these calls fail, all others end the process.
LOOKS_FOR_FILES = ("open", "openat")


class NoSeccomp(Exception):
    """The machine or the Python environment has no seccomp."""


@cache
def compiled() -> bytes:
    """BPF instructions for this machine's architecture. Raises NoSeccomp."""
    try:
        import pyseccomp  # loads libseccomp, which only Linux has
        with tempfile.TemporaryFile() as file:
            _allowing(pyseccomp).export_bpf(file)
            file.seek(0)
            return file.read()
    except (ImportError, RuntimeError, AttributeError, OSError) as reason:
        raise NoSeccomp(str(reason)) from None


def _allowing(seccomp):
    """A filter in which any call that no rule allows, or one of another architecture, ends the process at once."""
    rules = seccomp.SyscallFilter(seccomp.KILL_PROCESS)
    rules.set_attr(seccomp.Attr.ACT_BADARCH, seccomp.KILL_PROCESS)
    for name in (*MEMORY, *ENDING):
        rules.add_rule(seccomp.ALLOW, name)
    rules.add_rule(seccomp.ALLOW, "write", seccomp.Arg(0, seccomp.EQ, 1))
    anonymous = seccomp.Arg(3, seccomp.MASKED_EQ, mmap.MAP_ANONYMOUS, mmap.MAP_ANONYMOUS)
    rules.add_rule(seccomp.ALLOW, "mmap", seccomp.Arg(2, seccomp.MASKED_EQ, mmap.PROT_EXEC, 0), anonymous)
    for name in LOOKS_FOR_FILES:
        rules.add_rule(seccomp.ERRNO(errno.EACCES), name)
    return rules
