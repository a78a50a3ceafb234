"""One lane in the scheduler: its generator, its pending request and its clock; and the forwards that lanes share.

Work is computed from the shapes of forwards and not measured. A clock is the measured sum of a lane's shares.
"""
from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from playground.contract import CanvasDecoder, Decoder, WatchesBeams
from playground.contract.assembly import Assembly
from playground.decoding.canvas import Canvas
from playground.decoding.lane import Lane
from playground.decoding.overlay_reading import reading_of
from playground.decoding.requests import AnyShare, Pause, Request
from playground.engine.forward_timer import ForwardTimer
from playground.engine.hooks import LayerPlan
from playground.errors import Refusal
from playground.events import Done, Event, Failed, Forward, Reason, rounded

MOST_EVENTS = 10_000  # events without a request after which a strategy is considered to be in an endless loop
ROWS_AT_ONCE = 16  # rows of a forward that take about as long to compute as the weights take to read
PAUSED = 1.0  # forwards of one row that a part of a long computation counts as
POLLING = 8.0  # forwards of one row that others may run each time a lane only waits for another process
HOST = torch.device("cpu")
log = logging.getLogger(__name__)


class LaneRun(Protocol):
    """One lane in a session: a `Runner`, a `Refused`, or the lane of a server (`playground.remote`)."""

    @property
    def remote(self) -> bool:
        """Whether a server generates the text."""

    @property
    def finished(self) -> bool: ...

    @property
    def clock(self) -> float:
        """Seconds that it took."""

    @property
    def work(self) -> float:
        """In forwards of one row, computed from shapes."""

    @property
    def feeds(self) -> Sequence[AnyShare]:
        """Forwards that it waits for."""

    def arrived(self, patience: float) -> bool:
        """Whether a server has sent something, which is waited for so many seconds."""

    def go_on(self) -> list[Event]:
        """Run up to the next forwards, which have run before; returns the events."""

    def stop(self) -> list[Event]:
        """End it now; the text so far remains."""


class TimedShare(NamedTuple):
    """A lane's share of a forward."""

    timer: ForwardTimer
    part: float


class Runner:
    """One lane's generator, its pending request and its clock."""

    remote = False  # whether a server generates the text; see playground.remote

    def __init__(self, lane: Lane | Canvas, assembly: Assembly):
        self.lane, self.clock = lane, 0.0
        self.work = 0.0  # in forwards of one row, computed from shapes
        target = lane.target_model
        self._one_row = target.flops(1, 0, target.depth)
        self._generator = _decode(assembly, lane)
        self._request: Request | None = None
        # of the complete text, for overlays
        self._reading = _reading_of(lane, assembly) if isinstance(lane, Lane) else None
        self._watching = [overlay for overlay in assembly.overlays if isinstance(overlay, WatchesBeams)]
        self._ran: list[Forward] = []  # forwards that do not count as work yet
        self._untimed: list[tuple[Forward, TimedShare]] = []  # forwards that may not have ended
        self._answered = self.finished = False

    @property
    def feeds(self) -> list[AnyShare]:
        """Pending forwards of the lane; empty if it can continue, as when another lane ran a shared forward."""
        return [feed for feed in self._request.feeds if feed.logits is None] if self._request else []

    def arrived(self, patience: float) -> bool:
        return False

    def advance(self) -> list[Event]:
        """Run the pending forwards and the strategy up to its next ones; returns the events."""
        return advance([self])[0]

    def go_on(self) -> list[Event]:
        """After the pending forwards: run the strategy up to its next ones; returns the events."""
        start = perf_counter()
        try:
            with torch.inference_mode():  # a strategy that trains enables gradients itself
                self._go_on()
        except Exception as error:
            self.fail(error)
        finally:
            self.clock += perf_counter() - start
        ran, self._ran = self._ran, []
        self.work += self._work_of(ran)
        return [] if self._drafts_unread else self._drain()

    @property
    def _drafts_unread(self) -> bool:
        """Whether the next forward reads tokens that only the device knows: times of earlier ones would be waited for.
        """
        return not self.finished and any(feed.work.given is not None for feed in self.feeds)

    def _work_of(self, forwards: list[Forward]) -> float:
        """The weights are read once for all rows of a forward, and each row is computed."""
        if not (forwards or self.feeds or self.finished):
            return PAUSED if isinstance(self._request, Pause) else POLLING
        flops = sum(forward.flops * (1 / forward.tokens + 1 / ROWS_AT_ONCE) for forward in forwards)
        return flops / self._one_row

    def _go_on(self) -> None:
        request = self._request
        if request is None:  # nothing has run yet
            self.lane.begin()
            self._resume(None)
        elif self._answered or request.go_on():
            self._resume(request.result)

    def fail(self, error: Exception) -> None:
        """End the lane with an error, turned into a message that says what to do."""
        if isinstance(error, Refusal):
            message = str(error)
        elif isinstance(error, torch.OutOfMemoryError):
            message = "The device ran out of memory: shorten the prompt, choose a smaller model, or quantise it."
        else:
            log.error("a lane failed", exc_info=error)
            message = (
                f"The strategy stopped with an unexpected error ({type(error).__name__}: {error}). "
                "The other lanes continue."
            )
        self._finish(Failed(message))

    def _resume(self, answer: object) -> None:
        """Run the strategy until it yields a request or the text is complete."""
        reason = self.lane.reason
        while not reason:
            if len(self.lane.events) > MOST_EVENTS:
                raise RuntimeError(f"it yielded {MOST_EVENTS} events without a request: it may be in an endless loop")
            try:
                yielded = self._generator.send(answer)
            except StopIteration:
                reason = self.lane.reason = "end"
                break
            answer = None
            if isinstance(yielded, Request):
                self._request, self._answered = yielded, yielded.go_on()
                if not (self._answered and self.lane.reason):  # otherwise a commit completed the text
                    return
            elif isinstance(yielded, Event):
                self.lane.record(yielded)
            else:
                raise TypeError(f"a strategy yields events and requests, not {type(yielded).__name__}")
            reason = self.lane.reason
        self._close(reason)

    def _close(self, reason: Reason) -> None:
        """The text is complete: end the lane, once its overlays have read it."""
        reading, self._reading = self._reading, None
        if reading and not reading.go_on():
            self._request, self._answered = reading, False
            return
        self._finish(Done(reason, self.lane.limit))

    def stop(self) -> list[Event]:
        """End the lane now; the text so far remains."""
        if not self.finished:
            self._finish(Done(self.lane.reason, self.lane.limit) if self.lane.reason else Done("stopped"))
        return self._drain()

    def _finish(self, last: Event) -> None:
        self.finished = True
        self.lane.remember()
        self.lane.events.append(last)
        try:
            if self._request:
                self._request.close()
            self._generator.close()
        except Exception:  # the lane has ended, so this is only logged
            log.exception("a strategy failed while it was closed")

    def charge(self, event: Forward, share: TimedShare) -> None:
        """Record a forward. Its device may still compute it; the clock then runs on while the lane waits for it."""
        self.clock += share.timer.host * share.part
        if share.timer.pending:
            self._untimed.append((event, share))
        else:
            event.seconds = rounded(share.timer.host * share.part)
        self.lane.events.append(event)
        self._ran.append(event)

    def _drain(self) -> list[Event]:
        untimed, self._untimed = self._untimed, []
        with suppress(RuntimeError):  # of a device: it has failed the lane already
            for event, share in untimed:
                event.seconds = rounded(share.timer.seconds() * share.part)
        events, self.lane.events = self.lane.events, []
        for overlay in self._watching:
            for happened in events:
                overlay.watch(happened)
        return events


class PendingFeed(NamedTuple):
    """A feed and the runners that wait for it; several if it belongs to a shared prefix."""

    feed: AnyShare
    runners: list[Runner]


def advance(runners: Sequence[LaneRun]) -> list[list[Event]]:
    """A turn of these lanes: their pending forwards, then their strategies up to the next ones; returns the events of
    each.
    """
    with torch.inference_mode():  # the mode that strategies run in, so that they may write to the results
        for batch in _batches(runners):
            _forward(batch)
    return [runner.stop() if runner.finished else runner.go_on() for runner in runners]


def _batches(runners: Sequence[LaneRun]) -> Iterable[list[PendingFeed]]:
    """The pending forwards of these lanes, those of one model together."""
    pending: dict[int, PendingFeed] = {}
    for runner in [runner for runner in runners if isinstance(runner, Runner)]:
        for feed in runner.feeds:
            pending.setdefault(id(feed), PendingFeed(feed, [])).runners.append(runner)
    batches: dict[int, list[PendingFeed]] = {}
    for item in pending.values():
        batches.setdefault(item.feed.batch, []).append(item)
    return batches.values()


def _forward(batch: list[PendingFeed]) -> None:
    """Run one batched forward. If it fails, as for lack of memory, every feed is run separately."""
    if len(batch) > 1:
        try:
            return _run(batch)
        except Exception:
            log.info("a forward of %d lanes failed; running them separately", len(batch))
    for item in batch:
        _run_alone(item)


def _run_alone(pending: PendingFeed) -> None:
    """Run one feed. If it fails, one waiting lane fails and it is retried for the others."""
    for index, runner in enumerate(pending.runners):
        try:
            return _run([PendingFeed(pending.feed, pending.runners[index:])])
        except Exception as error:
            runner.fail(error)


def _run(batch: list[PendingFeed]) -> None:
    feeds = [feed for feed, _ in batch]
    logits, captured, timer = _timed_forward(feeds)
    events = [feed.describe() for feed in feeds]
    counts = [event.tokens for event in events]
    shares = {layer: states.split(counts) for layer, states in captured.items()}
    chosen = list(feeds[0].plan.routing.chosen) if feeds[0].plan.routing else []
    lanes = len({id(runner) for _, runners in batch for runner in runners})
    if lanes > 1:
        timer.wait()  # otherwise the lane that reads its rows first would bear the whole wait
    for i, ((feed, runners), event, raw) in enumerate(zip(batch, events, logits)):
        feed.logits, feed.captured = raw, {layer: shares[layer][i] for layer in feed.plan.capture}
        feed.lanes = [runner.lane for runner in runners]
        if len(batch) > 1 and feed.plan.routing:
            feed.plan.routing.chosen = [layer.split(counts)[i] for layer in chosen]
        event.lanes = lanes
        _charge(runners, event, TimedShare(timer, counts[i] / sum(counts) / len(runners)))


def _timed_forward(feeds: list[AnyShare]) -> tuple[list[Tensor], dict[int, Tensor], ForwardTimer]:
    """Logits of each feed, captured states of all, and their timer. An asynchronous feed is the only one."""
    model, in_flight = feeds[0].stream.model, feeds[0].in_flight
    if in_flight:
        timer = ForwardTimer(HOST)
        outputs = in_flight.wait()
        timer.stop()
        return *outputs, timer
    with model.lock:
        timer = ForwardTimer(model.device)
        outputs = model.forward([feed.work for feed in feeds], _plan_of(feeds))
        timer.stop(model.launched_ahead)
    return *outputs, timer


def _plan_of(feeds: list[AnyShare]) -> LayerPlan:
    """The plan of a batched forward, which captures every layer that any feed needs."""
    plan = feeds[0].plan  # with its routing, which in a batch only notes what the routers chose
    return plan if len(feeds) == 1 else replace(plan, capture=frozenset().union(*(feed.plan.capture for feed in feeds)))


def _charge(runners: list[Runner], event: Forward, share: TimedShare) -> None:
    """Record a forward in the lanes that waited for it and split its cost equally among them."""
    event.readers, event.flops = len(runners), event.flops / len(runners)
    for runner in runners:
        runner.charge(event if event.readers == 1 else replace(event), share)  # events are mutable: a copy for each


def _reading_of(lane: Lane, assembly: Assembly) -> Request | None:
    return reading_of(lane, lane.target_model, assembly.overlays, lane.loaded_model)


def _decode(assembly: Assembly, lane: Lane | Canvas) -> Generator[Event | Request, Any, None]:
    """What samplers yield before the prompt is read, then what the decoder yields.

    It runs when the lane is first scheduled, so that errors belong to this lane.
    """
    steps = _steps(assembly.decoder, lane)
    if not isinstance(steps, Iterator):
        raise TypeError(
            f"decode of {type(assembly.decoder).__name__} returned {type(steps).__name__}: it has to be a generator, "
            "so write `yield`"
        )
    if isinstance(lane, Lane):
        for sampler in assembly.samplers:
            yield from sampler.prepare(lane)
    return (yield from steps)


def _steps(decoder: Decoder, lane: Lane | Canvas) -> Iterator[Event | Request]:
    """What a decoder yields for a lane, or a decoder of canvases for a canvas."""
    if isinstance(lane, Lane):
        return decoder.decode(lane)
    if not isinstance(decoder, CanvasDecoder):
        raise TypeError(f"{decoder.title} continues a text and fills no canvas")
    return decoder.decode(lane)


class Refused:
    """Takes the place of a Runner if its lane could not be set up. Its only event is Failed."""

    clock = work = 0.0
    feeds: tuple[AnyShare, ...] = ()
    remote = False

    def __init__(self, message: str):
        self._message, self.finished = message, False

    def arrived(self, patience: float) -> bool:
        return False

    def go_on(self) -> list[Event]:
        self.finished = True
        return [Failed(self._message)]

    def stop(self) -> list[Event]:
        return [] if self.finished else self.go_on()


def batchable(runner: LaneRun, other: LaneRun) -> bool:
    """Whether the pending forwards of two lanes can share a batch."""
    batches = {feed.batch for feed in other.feeds}
    return all(feed.batch in batches for feed in runner.feeds)
