"""The time of a forward, measured on its device so that the host need not wait for it."""
from __future__ import annotations

from time import perf_counter

import torch


class ForwardTimer:
    """Times the forward that is launched after it was made and before `stop`.

    A CUDA device runs kernels after their launch. Two events in its stream mark begin and end, and are read later:
    whatever the host reads of the forward's results has waited for it anyway, and a second wait would only leave the
    device without work. Other devices are timed by the host.
    """

    def __init__(self, device: torch.device):
        self.device, self.host = device, 0.0  # seconds of the host: launching, and waiting if `wait` was called
        # whether `host` may be less than the seconds of the forward
        self.pending = device.type == "cuda" and torch.cuda.is_initialized()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.pending else []
        self._start = perf_counter()
        self._mark(0)

    def stop(self, marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None) -> None:
        """The forward has been launched; `marks` are its begin and end if that was earlier, in another stream."""
        if marks:
            self._events = list(marks)
        else:
            self._mark(1)
        if self.device.type == "mps":
            torch.mps.synchronize()
        self.host = perf_counter() - self._start

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Wait until the forward has ended."""
        if self._events:
            self._finish()
            self.host = perf_counter() - self._start

    def seconds(self) -> float:
        """Seconds that the forward took. Waits only if it has not ended yet."""
        if not self._events:
            return self.host
        self._finish()
        return self._events[0].elapsed_time(self._events[1]) / 1000

    def _finish(self) -> None:
        if not self._events[1].query():
            self._events[1].synchronize()
