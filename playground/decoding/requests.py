"""Requests, which a strategy yields, and the forwards they wait for.

A request is a series of steps, each of which waits for forwards; its answer comes back from the yield. Whoever serves
requests may put forwards of one model into one batch.
"""
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.events import Forward

POLL = 0.005  # seconds a background request may hold the worker before other runs continue


class ForwardReader(Protocol):
    """Who reads the logits of a forward."""

    name: str

    @property
    def model(self) -> Any: ...


class FeedSource(Protocol):
    """The reader of a text: a stream, or a prefix that several lanes share."""

    name: str
    model: Model
    prompt: list[int]
    captures: frozenset[int]  # layers before which hidden states are captured
    reads_again: bool  # it has read the text before, with other weights


class InFlight(Protocol):
    """A forward that runs in a worker thread (`decoding.async_forward.AsyncForward`)."""

    meanwhile: float  # seconds that overlapped with other work of the lane, once it was waited for

    def wait(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Wait for it; returns what Model.forward returned."""


Source = TypeVar("Source", bound=ForwardReader)
Work = TypeVar("Work")


@dataclass
class ForwardShare(Generic[Source, Work]):
    """The share of one reader in a forward. `logits` and `captured` are filled in when it has run.

    Several lanes may wait for the same share if it reads a prompt they share.
    """

    stream: Source
    work: Work
    plan: LayerPlan = field(default_factory=LayerPlan)
    name: str = ""  # how the forward is reported, if not by the stream's name
    logits: Tensor | None = None  # [rows, V]
    captured: dict[int, Tensor] = field(default_factory=dict)  # hidden states before a layer, [rows, hidden_size]
    in_flight: InFlight | None = None  # set if it runs in a worker thread
    lanes: list[Any] = field(default_factory=list)  # lanes that share its cost, once it has run

    def __post_init__(self) -> None:
        # feeds with the same number can share a batch: all layers of one model run, with its own choice of experts
        routed = self.plan.routing is not None and self.plan.routing.ranks
        self.batch = id(self.stream.model) if self.plan.is_whole and not routed else id(self)

    def run_aside(self, in_flight: InFlight) -> None:
        """It runs in a worker thread, alone."""
        self.in_flight, self.batch = in_flight, id(self)

    def result(self) -> Tensor:
        """The logits, [rows, V]. Raises RuntimeError if it has not run."""
        if self.logits is None:
            raise RuntimeError(f"the forward of {self.stream.name} has not run: yield it first")
        return self.logits

    def describe(self) -> Forward:
        """The event for this forward, which has run."""
        raise NotImplementedError


class Feed(ForwardShare[FeedSource, ForwardInput]):
    """The share of one stream in a forward over texts."""

    @property
    def rows(self) -> int:
        return len(self.work.tokens)

    def describe(self) -> Forward:
        """The event for this forward, which has run."""
        model, work, rows = self.stream.model, self.work, len(self.work.tokens)
        prompt = work.start < len(self.stream.prompt) and not self.stream.reads_again
        phase: Literal["prefill", "decode", "catch_up"]
        phase = "prefill" if prompt else "catch_up" if work.last_only and rows > 1 else "decode"
        layers, routing, compute = self.plan.layers(model.depth), self.plan.routing, self.plan.compute
        chosen = {"experts": len(routing.ranks)} if routing and routing.ranks else {}
        flops = model.flops(rows, work.context, layers, **chosen)
        if compute and compute.ran:
            flops, layers = flops - model.flops_saved(rows, work.context, compute), compute.layers
        meanwhile = self.in_flight.meanwhile if self.in_flight else 0.0
        return Forward(
            self.name or self.stream.name, phase, rows, work.context, layers, flops=flops, meanwhile=meanwhile
        )


AnyShare = ForwardShare[Any, Any]
Result = TypeVar("Result")
StepsTo = Generator[Sequence[AnyShare], None, Result]
"""The forwards that are waited for, one step after the other, and then a result."""
Steps = StepsTo[Any]


class Request:
    """A request that a strategy yields. `go_on` advances to the next forwards it needs, or to its result."""

    result: Any = None

    def __init__(self, steps: Steps):
        self._steps = steps
        self.feeds: Sequence[AnyShare] = ()

    def go_on(self) -> bool:
        """Consume the served `feeds` and advance to the next ones. Returns True once `result` is available."""
        try:
            self.feeds = next(self._steps)
            return False
        except StopIteration as stop:
            self.feeds, self.result = (), stop.value
            return True

    def close(self) -> None:
        """End it without an answer; what it does in the background is cancelled."""
        self._steps.close()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a request has no {name!r}: write `answer = yield lm.…`, the answer comes back from the yield"
        )


class Immediate(Request):
    """A request that needs no forward."""

    def __init__(self, act: Callable[[], Any]):
        super().__init__(self._once(act))
        self.served = False

    def _once(self, act: Callable[[], Any]) -> Steps:
        self.served = True
        return act()
        yield


class Pause(Request):
    """Lets other lanes and other visitors' runs go first, between two parts of a long computation."""

    def __init__(self) -> None:
        super().__init__(self._once())

    def _once(self) -> Steps:
        yield []


class Background(Request):
    """Python work in a separate thread. Other lanes and other visitors' runs continue meanwhile.

    Answers with what the work returns; what it raises is raised where the request was yielded.
    """

    def __init__(self, work: Callable[[], Any]):
        super().__init__(in_background(work))


def in_background(work: Callable[[], Any], cancel: Callable[[], None] = lambda: None) -> Steps:
    """The steps of work in a thread, which is cancelled if the lane ends before."""
    done: Future = Future()
    Thread(target=_complete, args=(done, work), daemon=True).start()
    try:
        while not done.done():
            wait([done], timeout=POLL)
            yield []
    finally:
        if not done.done():
            cancel()
    return done.result()


def _complete(done: Future, work: Callable[[], Any]) -> None:
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)


class Together(Request):
    """Independent requests served side by side. Answers with a tuple."""

    def __init__(self, *requests: Request):
        super().__init__(side_by_side(requests))


def side_by_side(requests: Iterable[Request]) -> Steps:
    """Serve requests to different streams at the same time. Raises RuntimeError if two of them go to one stream."""
    waiting = requests = list(requests)
    try:
        while waiting := [request for request in waiting if not request.go_on()]:
            feeds = [feed for request in waiting for feed in request.feeds]
            if len({id(feed.stream) for feed in feeds}) < len(feeds):
                raise RuntimeError("two requests to one stream cannot be served side by side: yield them in turn")
            yield feeds
    finally:
        for request in waiting:
            request.close()
    return tuple(request.result for request in requests)
