"""Forwards in the worker thread of a model, while the lane that requested them continues."""
from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from playground.decoding.requests import Request, Steps
from playground.engine.forward_timer import ForwardTimer
from playground.events import rounded

if TYPE_CHECKING:
    from torch import Tensor

    from playground.decoding.requests import AnyShare


class AsyncForward:
    """One forward in a worker thread."""

    def __init__(self, feed: AnyShare):
        self.meanwhile, self._model = 0.0, feed.stream.model
        self._future = self._model.thread.submit(self._run, feed)

    def _run(self, feed: AnyShare) -> tuple[list[Tensor], dict[int, Tensor]]:
        with self._model.lock:
            timer = ForwardTimer(self._model.device)
            outputs = self._model.forward([feed.work], feed.plan)
            timer.stop(self._model.launched_ahead)
        timer.wait()
        self._seconds = timer.host
        return outputs

    def wait(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Wait for the forward; returns what Model.forward returned. Sets `meanwhile` to the overlapped seconds."""
        start = perf_counter()
        outputs = self._future.result()
        self.meanwhile = rounded(max(0.0, self._seconds - (perf_counter() - start)))
        return outputs


class AsyncRequest(Request):
    """A request whose first forwards have been submitted; yield it to get the result."""

    def __init__(self, request: Request):
        self._finished = request.go_on()
        for feed in request.feeds:
            feed.run_aside(AsyncForward(feed))
        super().__init__(self._continue(request))

    def _continue(self, request: Request) -> Steps:
        while not self._finished:
            yield request.feeds
            self._finished = request.go_on()
        return request.result
