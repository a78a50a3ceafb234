"""How a forward of static sizes and addresses is recorded, and how one runs beside the host's other work."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

Run = Callable[[], None]
Record = Callable[[Run], Run]
"""Runs a forward whose inputs, outputs, sizes and addresses never change; returns a function that runs it again."""


def run_eagerly(run: Run) -> Run:
    """A `Record` for devices without graphs."""
    run()
    return run


class CudaGraphRecorder:
    """Records CUDA graphs. They share a memory pool for intermediate results, because only one runs at a time."""

    def __init__(self, device: torch.device):
        self._device, self._pool, self._stream = device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            # around both, so that a failed capture leaves the current stream as it was
            with torch.cuda.stream(self._stream):
                run()  # warm-up: libraries allocate workspaces and kernels are loaded at the first call
                self._capture(graph, run)
            torch.cuda.current_stream().wait_stream(self._stream)
            graph.replay()  # capture does not execute
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Run) -> None:
        """As `torch.cuda.graph`, which would wait for all streams of the device, those of other threads too."""
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # ending a failed capture fails too, and says less
                graph.capture_end()
            raise
        graph.capture_end()


class SideStream:
    """Work on the device beside the current stream: it begins after what was launched there, and is waited for later.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # begin and end of the last work

    def __call__(self, first: Run, run: Run) -> None:
        """Launch `first`, which is not timed, and `run`."""
        if self._stream is None:
            first()
            return run()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self.marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            first()
            self.marks[0].record(self._stream)
            run()
            self.marks[1].record(self._stream)

    def join(self) -> None:
        """What is launched from now on begins after this work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
