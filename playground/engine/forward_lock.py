"""Which threads may run forwards at the same time."""
from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from threading import RLock

import torch


class SeveralLocks:
    """The locks of several devices, taken in one order everywhere, so that no two threads wait for each other."""

    def __init__(self, locks: Iterable[RLock]):
        self._locks = list(locks)

    def __enter__(self) -> SeveralLocks:
        for lock in self._locks:
            lock.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        for lock in reversed(self._locks):
            lock.release()


def lock_for(*devices: torch.device) -> RLock | SeveralLocks:
    """The lock that a forward on these devices holds; re-entrant, so that a caller may hold it too.

    A model's forwards share static inputs and the memory of recorded graphs. Models on one accelerator share one lock,
    because no other thread may use the device while a graph is recorded. On a CPU each model has its own, so that a
    draft and its target may run at the same time.
    """
    accelerators = sorted({(device.type, device.index or 0) for device in devices if device.type != "cpu"})
    if not accelerators:
        return RLock()
    locks = [_shared_lock(*accelerator) for accelerator in accelerators]
    return locks[0] if len(locks) == 1 else SeveralLocks(locks)


@cache
def _shared_lock(kind: str, index: int) -> RLock:
    return RLock()
