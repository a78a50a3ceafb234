"""The heaps of the C library."""
from __future__ import annotations

import subprocess
import sys

import pytest

HEAPS = """
import ctypes, threading
from playground.engine.heap_memory import limit_arenas
{limit}
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype = ctypes.c_void_p
barrier = threading.Barrier(12)
def allocate():
    libc.malloc(1000)
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.malloc_stats()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other C libraries have other heaps")
@pytest.mark.parametrize("limit, most", [("limit_arenas()", 2), ("", None)])
def test_threads_allocate_from_two_heaps(limit, most):
    program = [sys.executable, "-c", HEAPS.format(limit=limit)]
    heaps = subprocess.run(program, capture_output=True, text=True, check=True).stderr.count("Arena ")
    assert heaps <= most if most else heaps > 2
