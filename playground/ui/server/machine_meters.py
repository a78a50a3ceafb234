"""How busy the machine is: measured values only, for the meters of the live view."""
from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import psutil

from playground.engine.device_memory import container_free, container_limit
from playground.player.frames import Reading

FRESH = 0.9  # seconds a reading is used for all runs: meters must cost next to nothing
STALE = 3.0  # seconds without a reading after which the processor's average since then is out of date


class MachineMeters:
    """Reads the meters at most once per FRESH seconds, for any number of threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._last: Reading = {}
        self._read_at = -STALE

    def read(self) -> Reading:
        """`cpu` and `gpu` as shares of 1; `memory` and `memory_total` in bytes; `gpu_memory` and `gpu_memory_total` in
        bytes of each GPU in use. What cannot be measured is omitted: `cpu` needs an earlier reading, the others a GPU.
        """
        with self._lock:
            age = time.monotonic() - self._read_at
            if age >= FRESH:
                self._last = {**processor(age), **memory(), **gpu()}
                self._read_at = time.monotonic()
            return self._last


def processor(age: float) -> dict[str, float]:
    """The share of all cores in use since the last call, which was `age` seconds ago."""
    share = psutil.cpu_percent() / 100
    return {"cpu": round(share, 3)} if age < STALE else {}


def memory() -> dict[str, float]:
    """Of the container if it has a limit, otherwise of the machine."""
    limit, free = container_limit(), container_free()
    if limit is not None and free is not None:
        return {"memory": limit - free, "memory_total": limit}
    seen = psutil.virtual_memory()
    return {"memory": seen.total - seen.available, "memory_total": seen.total}


def gpu() -> Reading:
    """Of the GPUs that this process computes on; empty if there is none. Does not start CUDA by itself."""
    import torch  # slow to import, and loaded by the first model anyway

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    cuda = torch.cuda
    used = [device for device in range(cuda.device_count()) if cuda.memory_reserved(device)] or [cuda.current_device()]
    memories = [cuda.mem_get_info(device) for device in used]
    filled, totals = [total - free for free, total in memories], [total for _, total in memories]
    return {"gpu_memory": filled, "gpu_memory_total": totals} | _utilisation(cuda, used)


def _utilisation(cuda: Any, devices: list[int]) -> dict[str, float]:
    """The mean over the devices."""
    with suppress(Exception):  # needs a library of the driver that may be missing, or may not know this device
        return {"gpu": sum(map(cuda.utilization, devices)) / len(devices) / 100}
    return {}

