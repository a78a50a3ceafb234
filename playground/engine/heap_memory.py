"""Memory of the C library's heaps, from which Python and torch allocate on the CPU."""
from __future__ import annotations

import ctypes
from functools import cache

ARENAS = 2  # heaps of the C library
M_ARENA_MAX = -8  # its option, from malloc.h


@cache
def _glibc() -> ctypes.CDLL | None:
    """The GNU C library; None on other systems, such as macOS and Windows."""
    try:
        library = ctypes.CDLL("libc.so.6")
        return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
    except OSError:
        return None


def limit_arenas() -> None:
    """Let all threads allocate from few heaps. Call it before threads start.

    Each of a server's threads would otherwise get a heap of its own, and free memory in one is no use to another: after
    a thousand visitors a page held 90 MB more of it, and not one object more.
    """
    if library := _glibc():
        library.mallopt(M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Hand what was freed on the CPU back to the system. The C library would keep much of it: tensors of a few
    megabytes leave holes in its heap.
    """
    if library := _glibc():
        library.malloc_trim(0)
