"""Watch the free memory of a device that visitors share: the KV caches of their runs grow with every token."""
from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from playground.ui.models.fits import DeviceMemory, memory_of

LEAST = 0.1  # of a device's memory; with less of it free, a run has to end
PAUSE = 0.25  # seconds between two readings


class MemoryWatch:
    """How much memory a device lacks, read at most once in `pause` seconds."""

    def __init__(self, device: str, memory: Callable[[str], DeviceMemory] = memory_of, pause: float = PAUSE):
        self._device, self._memory, self._pause = device, memory, pause
        self._next = 0.0

    def missing(self) -> int:
        """Bytes that have to be released so that LEAST of the memory is free; 0 if it is, or was a moment ago."""
        if monotonic() < self._next:
            return 0
        self._next = monotonic() + self._pause
        memory = self._memory(self._device)
        return max(0, round(LEAST * memory.total) - memory.free)
