"""Elapsed time: wall clock on a CPU, CUDA events on a GPU, which do not synchronise in between."""
from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Any

import torch


class Timer:
    """Measures the body of a `with` statement. On a GPU, reading `seconds` waits for the end event: read it late."""

    def __init__(self, device: torch.device):
        self._device = device

    def __enter__(self) -> Timer:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # pending work would hide the launch overhead of what follows
        self._start = self._mark()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end = self._mark()

    @property
    def seconds(self) -> float:
        if self._device.type != "cuda":
            return self._end - self._start
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1000

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
