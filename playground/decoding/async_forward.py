"""Forwards made in a thread of their model's own, while the lane that asked for them goes on."""
from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from playground.decoding.requests import Request, Steps

if TYPE_CHECKING:
    from torch import Tensor

    from playground.decoding.requests import Feed


class Flight:
    """One forward on its way. What is told of it is settled before it begins, for it changes what it reads."""

    def __init__(self, feed: Feed):
        self.event, self._model = feed.describe(), feed.stream.model
        self._made = self._model.thread.submit(self._make, feed)

    def _make(self, feed: Feed) -> tuple[list[Tensor], dict[int, Tensor]]:
        with self._model.turn:
            begun = perf_counter()
            made = self._model.forward([feed.work], feed.plan)
            self._took = perf_counter() - begun
        return made

    def land(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """What Model.forward returned, once it is there. Seconds that nobody waited for are told as `meanwhile`."""
        begun = perf_counter()
        made = self._made.result()
        self.event.meanwhile = max(0.0, self._took - (perf_counter() - begun))
        return made


class AsyncRequest(Request):
    """A request that has been set out; its answer is there when this is yielded."""

    def __init__(self, request: Request):
        self._over = request.go_on()
        for feed in request.feeds:
            feed.flight = Flight(feed)
        super().__init__(self._land(request))

    def _land(self, request: Request) -> Steps:
        while not self._over:
            yield request.feeds
            self._over = request.go_on()
        return request.result
