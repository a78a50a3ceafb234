"""Which threads may run forwards at the same time."""
from __future__ import annotations

from functools import cache
from threading import RLock

import torch


def lock_for(device: torch.device) -> RLock:
    """The lock that a forward on this device holds; re-entrant, so that a caller may hold it too.

    A model's forwards share static inputs and the memory of recorded graphs. Models on one accelerator share one lock,
    because no other thread may use the device while a graph is recorded. On a CPU each model has its own, so that a
    draft and its target may run at the same time.
    """
    return RLock() if device.type == "cpu" else _shared_lock(device.type, device.index or 0)


@cache
def _shared_lock(kind: str, index: int) -> RLock:
    return RLock()
