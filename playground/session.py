"""Runs lanes side by side, fairly: the lane whose clock shows least is served next, one forward at a time.

A session is a plain synchronous object and owns no thread. Whoever drives it holds it by not calling `advance`.

    session = prepare(models, [Recipe("greedy"), Recipe("speculative")], Prompt("Once"), Limits())
    for stamped in session: ...
"""
from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter

import torch

from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Commit, Done, Event, Failed, Header, Stamped
from playground.lane import Lane, Limits
from playground.recipe import Assembly, Recipe, assemble
from playground.recorder import Recorder
from playground.strategy import Decoder
from playground.stream import Request
from playground.trace import Trace

MOST_EVENTS = 10_000  # before a strategy has to ask for something, so that nobody waits for it in vain
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Models:
    """The target and, where there is one, its draft."""

    target: Model
    draft: Model | None = None

    def by_stream(self, needs: set[str]) -> dict[str, Model]:
        if "draft" not in needs:
            return {"target": self.target}
        if self.draft is None:
            raise Refusal(f"This strategy needs a draft model and {self.target.name} has none: choose one that shares its vocabulary.", "draft")
        return {"target": self.target, "draft": self.draft}


@dataclass(frozen=True)
class Prompt:
    """What the models continue: raw text, or a user's message with an optional system message."""

    text: str
    chat: bool = False
    system: str = ""

    def encode(self, model: Model) -> list[int]:
        """Token ids; raises Refusal for an empty prompt and for one that leaves the model no room."""
        if not self.text.strip():
            raise Refusal("The prompt is empty: write something for the models to continue.", "prompt")
        ids = model.tokens.encode_chat(self.text, self.system) if self.chat else model.tokens.encode(self.text)
        if len(ids) >= model.context:
            raise Refusal(f"The prompt has {len(ids)} tokens, but {model.name} reads {model.context} at most: shorten it.", "prompt")
        return ids


@cache
def leave_a_core() -> None:
    """Let torch compute on all processor cores but one, which is left to whoever shows the run.

    Its threads wait for each other many times a token: where one of them has to share its core with a server or a
    browser, all of them stand still. Call it before the first forward; OMP_NUM_THREADS, where it is set, is obeyed.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


class Runner:
    """One lane's generator, its pending request and its clock."""

    def __init__(self, lane: Lane, assembly: Assembly):
        self.lane, self.clock = lane, 0.0
        self._generator = _speech(assembly.decoder, lane)
        self._request: Request | None = None
        self.finished = False

    def advance(self) -> list[Event]:
        """Serve the pending request by at most one forward and run the strategy up to its next request."""
        start = perf_counter()
        try:
            with torch.inference_mode():  # nothing here is differentiated; a strategy that learns says so itself
                self._serve()
        except Refusal as refusal:
            self._fail(str(refusal))
        except torch.OutOfMemoryError:
            self._fail("The device ran out of memory: shorten the prompt, take a smaller model, or quantise it.")
        except Exception as error:
            log.exception("a lane failed")
            self._fail(f"The strategy stopped with an unexpected error ({type(error).__name__}: {error}). The other lanes go on.")
        self.clock += perf_counter() - start
        return self._drain()

    def _serve(self) -> None:
        if self._request is None:
            self.lane.begin()
            self._run_on(None)
        elif self._request.advance():
            self._run_on(self._request.result)

    def _run_on(self, answer: object) -> None:
        """Let the strategy speak until it asks for something or the text is complete."""
        while not self.lane.reason:
            if len(self.lane.events) > MOST_EVENTS:
                raise RuntimeError(f"it told {MOST_EVENTS} events and asked for nothing: a loop in it needs a request")
            try:
                said = self._generator.send(answer)
            except StopIteration:
                self.lane.reason = "end"
                break
            answer = None
            if isinstance(said, Request):
                self._request = said
                return
            if not isinstance(said, Event):
                raise TypeError(f"a strategy yields events and requests, not {type(said).__name__}")
            self.lane.record(said)
        self._finish(Done(self.lane.reason))

    def stop(self) -> list[Event]:
        """End now; the text stays as it is."""
        if not self.finished:
            self._finish(Done("stopped"))
        return self._drain()

    def _fail(self, message: str) -> None:
        self._finish(Failed(message))

    def _finish(self, last: Event) -> None:
        self.finished = True
        self.lane.events.append(last)
        try:
            self._generator.close()
        except Exception:  # the text is what it is; nobody waits for this strategy any more
            log.exception("a strategy failed while it was closed")

    def _drain(self) -> list[Event]:
        events, self.lane.events = self.lane.events, []
        return events


def _speech(decoder: Decoder, lane: Lane) -> Iterator[Event | Request]:
    """What a decoder yields. Nothing of it runs before the lane's first turn, so its errors are the lane's own."""
    said = decoder.decode(lane)
    if not isinstance(said, Iterator):
        raise TypeError(f"decode of {type(decoder).__name__} returned {type(said).__name__}: it has to be a generator, so write `yield`")
    return (yield from said)


class Refused:
    """Stands in for a runner whose lane could not be set up; it says so once."""

    clock = 0.0

    def __init__(self, message: str):
        self._message, self.finished = message, False

    def advance(self) -> list[Event]:
        self.finished = True
        return [Failed(self._message)]

    def stop(self) -> list[Event]:
        return [] if self.finished else self.advance()


class Session:
    """Lanes over one prompt. `trace` grows in place while they run."""

    def __init__(self, headers: list[Header], runners: list[Runner | Refused]):
        self.trace = Trace(headers)
        self._runners = runners

    @property
    def headers(self) -> list[Header]:
        return self.trace.headers

    @property
    def finished(self) -> bool:
        return all(runner.finished for runner in self._runners)

    def __iter__(self) -> Iterator[Stamped]:
        while not self.finished:
            yield from self.advance()

    def advance(self) -> list[Stamped]:
        """One request of the live lane whose clock shows least; empty when all are finished."""
        live = [lane for lane, runner in enumerate(self._runners) if not runner.finished]
        return self._advance(min(live, key=lambda lane: self._runners[lane].clock)) if live else []

    def step(self) -> list[Stamped]:
        """Every live lane runs up to and with its next commit."""
        stamped: list[Stamped] = []
        for lane, runner in enumerate(self._runners):
            committed = False
            while not (committed or runner.finished):
                new = self._advance(lane)
                committed = any(isinstance(s.event, Commit) for s in new)
                stamped += new
        return stamped

    def stop(self, lane: int | None = None) -> list[Stamped]:
        """End one lane, or all of them."""
        chosen = range(len(self._runners)) if lane is None else [lane]
        return [stamped for index in chosen for stamped in self._stamp(index, self._runners[index].stop())]

    def _advance(self, lane: int) -> list[Stamped]:
        return self._stamp(lane, self._runners[lane].advance())

    def _stamp(self, lane: int, events: list[Event]) -> list[Stamped]:
        stamped, clock = [], round(self._runners[lane].clock, 6)  # as a file keeps it, so that a saved run reads the same
        for event in events:
            stamped.append(Stamped(lane, len(self.trace.events), clock, event))
            self.trace.append(stamped[-1])
        return stamped


def prepare(models: Models, recipes: list[Recipe], prompt: Prompt, limits: Limits,
            recorder: type[Recorder] = Recorder) -> Session:
    """A session ready to run. Raises Refusal where nothing can run; a single lane that cannot says so in its own place."""
    if not recipes:
        raise Refusal("There is no lane to run: add one.", "lanes")
    if not all(limits.stop):
        raise Refusal("A stop string is empty, and an empty text is everywhere: leave it away.", "stop")
    if limits.max_new_tokens < 1:
        raise Refusal("The length must be at least 1 token.", "max_new_tokens")
    ids = prompt.encode(models.target)
    headers, runners = [], []
    for index, recipe in enumerate(recipes):
        header = _header(models, prompt, ids, limits)
        header.lane, header.strategy, header.title = index, recipe.strategy, recipe.strategy
        headers.append(header)
        try:
            assembly = assemble(recipe)
            _describe(header, assembly, models)
            chosen = models.by_stream(assembly.needs())
            lane_limits = replace(limits, forced=tuple(recipe.forced))
            lane = Lane(ids, chosen, assembly, lane_limits, recorder(models.target.tokens))
            runners.append(Runner(lane, assembly))
        except Refusal as refusal:
            runners.append(Refused(str(refusal)))
    return Session(headers, runners)


def _header(models: Models, prompt: Prompt, ids: list[int], limits: Limits) -> Header:
    target = models.target
    return Header(model=target.name, revision=target.revision, dtype=str(target.dtype).removeprefix("torch."), device=target.device.type,
                  quantization=target.quantization, seed=limits.seed, max_new_tokens=limits.max_new_tokens, stop=list(limits.stop),
                  chat=prompt.chat, prompt=prompt.text, prompt_ids=ids, prompt_pieces=target.tokens.pieces(ids), vocabulary=target.vocabulary)


def _describe(header: Header, assembly: Assembly, models: Models) -> None:
    decoder = assembly.decoder
    header.title, header.parts, header.guarantee = decoder.title, assembly.parts(), assembly.guarantee()
    header.reconstruction = any(part.reconstruction for part in assembly.strategies())
    if "draft" in assembly.needs() and models.draft:
        header.draft = models.draft.name
