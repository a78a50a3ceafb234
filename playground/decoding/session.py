"""Runs lanes side by side, fairly: the lane whose clock shows least is served next, one forward at a time.

Lanes whose clocks are about level and that wait for the same model share a forward, each with its own rows and cache.
So four lanes take less time than four runs, and none gets ahead: a lane's clock is the sum of its own shares. What they
have in common, the prompt, is read once for all of them (`prefixes`). A session is a plain synchronous object and owns
no thread. Whoever drives it holds it by not calling `advance`.

    session = prepare(models, [Recipe("greedy"), Recipe("speculative")], Prompt("Once"), Limits())
    for stamped in session: ...
"""
from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from playground.contract.lane_config import Assembly, LaneConfig, assemble, translating
from playground.decoding.canvas import Canvas, check_fit
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.requests import Feed, Request
from playground.decoding.shared_prefix import SharedPrefixes
from playground.decoding.visitor_memory import Memory
from playground.engine.hooks import LayerPlan
from playground.engine.load import differences
from playground.engine.model import Model
from playground.errors import Refusal
from playground.events import Commit, Done, Event, Failed, Fill, Forward, Header, Judged, Stamped
from playground.request_limits import quoted
from playground.trace import Trace
from playground.trace.result import Result

MOST_EVENTS = 10_000  # before a strategy has to ask for something, so that nobody waits for it in vain
LEVEL = 0.03  # seconds by which a lane's clock may be ahead of the hindmost one's for the two to share a forward
log = logging.getLogger(__name__)
Judge = Callable[[str], Judged]  # how right a text is as the answer to the prompt


@dataclass(frozen=True)
class Models:
    """The target and, where there is one, its draft, which may have tokens of its own."""

    target: Model
    draft: Model | None = None

    @cached_property
    def differences(self) -> str:
        """How the draft's tokens are not the target's, in a few words; empty where they are, and where there is no
        draft.
        """
        return differences(self.target.tokens, self.draft.tokens) if self.draft else ""

    @property
    def draft_place(self) -> str:
        """Where the draft lies, " on cuda:1"; empty where that is where the target does, and where there is no draft.
        """
        return f" on {self.draft.device}" if self.draft and self.draft.device != self.target.device else ""

    def by_stream(self, assembly: Assembly) -> dict[str, Model]:
        """The models a lane reads. Raises Refusal where there is no draft, and where a part of the lane cannot
        translate its tokens.
        """
        drafted = [part for part in assembly.strategies() if "draft" in part.needs]
        if not drafted:
            return {"target": self.target}
        if self.draft is None:
            raise Refusal(
                f"This strategy needs a draft model and {self.target.name} has none: choose one that shares its vocabulary.",
                "draft",
            )
        bound = [part.name for part in drafted if not part.translates]
        if bound and self.differences:
            raise Refusal(
                f"The draft model has another vocabulary ({self.differences}), which {bound[0]} cannot translate: choose a draft of the same "
                f"model family, or guess with {' or '.join(translating())}.",
                "draft",
            )
        return {"target": self.target, "draft": self.draft}


@dataclass(frozen=True)
class Prompt:
    """What the models continue: raw text, or a user's message with an optional system message and earlier (user,
    assistant) turns.
    """

    text: str
    chat: bool = False
    system: str = ""
    context: str = ""  # a passage the answer should rest on, read before the prompt
    before: tuple[tuple[str, str], ...] = ()

    def instructed(self, instruction: str) -> Prompt:
        """The same with an instruction before the question. It is no system message: not every chat template has a
        place for one.
        """
        divider = " " if self.chat else "\n"
        return replace(self, text=f"{instruction.strip()}{divider}{self.text}") if instruction.strip() else self

    def without_context(self) -> Prompt:
        """The same question with nothing to rest on."""
        return replace(self, context="")

    def whole(self) -> str:
        """Context and prompt as the model reads them."""
        passage = self.context.strip()
        if not passage:
            return self.text
        return f"Read this: {passage} Now answer: {self.text}" if self.chat else f"{passage}\n{self.text}"

    def encode(self, model: Model) -> list[int]:
        """Token ids; raises Refusal for an empty prompt, for turns without a chat, and for what leaves the model no
        room.
        """
        if not self.text.strip():
            raise Refusal("The prompt is empty: write something for the models to continue.", "prompt")
        if self.before and not self.chat:
            raise Refusal("Earlier turns belong to a chat: turn chat on, or take the turns away.", "before")
        ids = (
            model.tokens.encode_chat(self.whole(), self.system, self.before)
            if self.chat
            else model.tokens.encode(self.whole())
        )
        if len(ids) >= model.context:
            raise Refusal(
                f"The prompt has {len(ids)} tokens, but {model.name} reads {model.context} at most: shorten it.",
                "prompt",
            )
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
        self._generator = _speech(assembly, lane)
        self._request: Request | None = None
        self._begun = self._answered = self.finished = False

    @property
    def feeds(self) -> list[Feed]:
        """Forwards the lane waits for; empty where it can go on without. One that another lane waited for too may have
        been made already.
        """
        return [feed for feed in self._request.feeds if feed.logits is None] if self._request else []

    def advance(self) -> list[Event]:
        """Serve what the lane waits for and let the strategy speak until it waits again."""
        serve([self])
        return self.go_on()

    def go_on(self) -> list[Event]:
        """With what it waited for served, run to the next forward the lane waits for; what was told meanwhile."""
        start = perf_counter()
        try:
            with torch.inference_mode():  # nothing here is differentiated; a strategy that learns says so itself
                self._go_on()
        except Exception as error:
            self.fail(error)
        finally:
            self.clock += perf_counter() - start
        return self._drain()

    def _go_on(self) -> None:
        if not self._begun:
            self._begun = True
            self.lane.begin()
            self._run_on(None)
        elif self._answered or self._request.go_on():
            self._run_on(self._request.result)

    def fail(self, error: Exception) -> None:
        """Whatever goes wrong is this lane's own failure, and says what to do."""
        if isinstance(error, Refusal):
            message = str(error)
        elif isinstance(error, torch.OutOfMemoryError):
            message = "The device ran out of memory: shorten the prompt, take a smaller model, or quantise it."
        else:
            log.error("a lane failed", exc_info=error)
            message = f"The strategy stopped with an unexpected error ({type(error).__name__}: {error}). The other lanes go on."
        self._finish(Failed(message))

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
                self._request, self._answered = said, said.go_on()
                if self.lane.reason:  # what was kept completes the text
                    break
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

    def _finish(self, last: Event) -> None:
        self.finished = True
        self.lane.remember()
        self.lane.events.append(last)
        try:
            self._generator.close()
        except Exception:  # the text is what it is; nobody waits for this strategy any more
            log.exception("a strategy failed while it was closed")

    def _drain(self) -> list[Event]:
        events, self.lane.events = self.lane.events, []
        return events


class Due(NamedTuple):
    """A feed, and who waits for it: more than one lane where it reads a prompt for all of them."""

    feed: Feed
    runners: list[Runner]


def serve(runners: list[Runner]) -> None:
    """Carry out the forwards these lanes wait for, those of one model in one batch."""
    due: dict[int, Due] = {}
    for runner in runners:
        for feed in runner.feeds:
            due.setdefault(id(feed), Due(feed, [])).runners.append(runner)
    batches: dict[int, list[Due]] = {}
    for one in due.values():
        batches.setdefault(id(one.feed.stream.model if one.feed.plain else one.feed), []).append(one)
    with torch.inference_mode():  # as strategies speak: what they keep may be written into
        for batch in batches.values():
            _forward(batch)


def _forward(batch: list[Due]) -> None:
    """One forward. Where lanes together are too much for the device, each gets one of its own, so that one alone fails.
    """
    if len(batch) > 1:
        try:
            return _run(batch)
        except Exception:
            log.info("a forward of %d lanes failed; each goes alone", len(batch))
    for one in batch:
        _run_alone(one)


def _run_alone(due: Due) -> None:
    """A forward that fails is tried for each who waits for it, so that nobody goes on without an answer."""
    for place, runner in enumerate(due.runners):
        try:
            return _run([Due(due.feed, due.runners[place:])])
        except Exception as error:
            runner.fail(error)


def _run(batch: list[Due]) -> None:
    feeds, told = [feed for feed, _ in batch], [feed.describe() for feed, _ in batch]
    logits, captured, seconds = _made(feeds)
    rows = sum(feed.rows for feed in feeds)
    shares = {layer: states.split([feed.rows for feed in feeds]) for layer, states in captured.items()}
    lanes = len({id(runner) for _, runners in batch for runner in runners})
    for i, ((feed, runners), event, raw) in enumerate(zip(batch, told, logits)):
        feed.logits, feed.captured = raw, {layer: shares[layer][i] for layer in feed.plan.capture}
        feed.bearers = [runner.lane for runner in runners]
        event.seconds, event.lanes = seconds * feed.rows / rows, lanes
        _charge(runners, event)


def _made(feeds: list[Feed]) -> tuple[list[Tensor], dict[int, Tensor], float]:
    """Logits of each, captured states of all, and the seconds that was waited for. A forward made aside has no company.
    """
    model, flight = feeds[0].stream.model, feeds[0].flight
    with nullcontext() if flight else model.turn:
        start = perf_counter()
        made = flight.land() if flight else model.forward([feed.work for feed in feeds], _plan_of(feeds))
        return *made, perf_counter() - start


def _plan_of(feeds: list[Feed]) -> LayerPlan:
    """What a forward does that all of these share: it captures what any of them wants."""
    plan = feeds[0].plan
    return plan if len(feeds) == 1 else replace(plan, capture=frozenset().union(*(feed.plan.capture for feed in feeds)))


def _charge(runners: list[Runner], event: Forward) -> None:
    """Tell those who waited for a feed what was made. Where they are several, each bears an equal part of its cost."""
    part = len(runners)
    event.readers, event.seconds, event.flops = part, event.seconds / part, event.flops / part
    for runner in runners:
        runner.clock += event.seconds
        runner.lane.record(event if part == 1 else replace(event))  # every lane has an event of its own


def _speech(assembly: Assembly, lane: Lane | Canvas) -> Iterator[Event | Request]:
    """What samplers yield before the prompt is read, then what the decoder yields.

    Nothing of it runs before the lane's first turn, so its errors are the lane's own.
    """
    said = assembly.decoder.decode(lane)
    if not isinstance(said, Iterator):
        raise TypeError(
            f"decode of {type(assembly.decoder).__name__} returned {type(said).__name__}: it has to be a generator, so write `yield`"
        )
    for sampler in assembly.samplers:
        yield from sampler.prepare(lane)
    return (yield from said)


class Refused:
    """Stands in for a runner whose lane could not be set up; it says so once."""

    clock, feeds = 0.0, ()

    def __init__(self, message: str):
        self._message, self.finished = message, False

    def go_on(self) -> list[Event]:
        self.finished = True
        return [Failed(self._message)]

    def stop(self) -> list[Event]:
        return [] if self.finished else self.go_on()


class Session:
    """Lanes over one prompt. `trace` grows in place while they run. With a `judge`, a lane that was not stopped is told
    how right its text is.
    """

    def __init__(self, headers: list[Header], runners: list[Runner | Refused], judge: Judge | None = None):
        self.trace = Trace(headers)
        self._runners, self.judge = runners, judge
        _read_together(
            [runner.lane for runner in runners if isinstance(runner, Runner) and isinstance(runner.lane, Lane)]
        )

    @property
    def headers(self) -> list[Header]:
        return self.trace.headers

    @property
    def finished(self) -> bool:
        return not self._live()

    def _live(self) -> list[int]:
        return [lane for lane, runner in enumerate(self._runners) if not runner.finished]

    def __iter__(self) -> Iterator[Stamped]:
        while not self.finished:
            yield from self.advance()

    def advance(self) -> list[Stamped]:
        """One turn of the live lane whose clock shows least, and of those that share its forward; empty when all are
        finished.
        """
        return self._turn(self._live())

    def step(self) -> list[Stamped]:
        """Every live lane runs up to and with its next commit."""
        stamped: list[Stamped] = []
        waiting = self._live()
        while waiting:
            new = self._turn(waiting)
            committed = {s.lane for s in new if isinstance(s.event, (Commit, Fill))}
            waiting = [lane for lane in waiting if lane not in committed and not self._runners[lane].finished]
            stamped += new
        return stamped

    def _turn(self, lanes: list[int]) -> list[Stamped]:
        """Of lanes that are about level, one that needs no forward goes first; then the hindmost, with all that wait
        for its model.
        """
        if not lanes:
            return []
        runners = self._runners
        hindmost = min(lanes, key=lambda lane: runners[lane].clock)
        level = [lane for lane in lanes if runners[lane].clock <= runners[hindmost].clock + LEVEL]
        free = [lane for lane in level if not runners[lane].feeds]
        return self._serve(
            free[:1] or [lane for lane in level if lane == hindmost or _shared(runners[lane], runners[hindmost])]
        )

    def _serve(self, lanes: list[int]) -> list[Stamped]:
        serve([self._runners[lane] for lane in lanes])
        return [stamped for lane in lanes for stamped in self._stamp(lane, self._told(self._runners[lane]))]

    def _told(self, runner: Runner | Refused) -> list[Event]:
        return runner.stop() if runner.finished else runner.go_on()

    def stop(self, lane: int | None = None) -> list[Stamped]:
        """End one lane, or all of them."""
        chosen = range(len(self._runners)) if lane is None else [lane]
        return [stamped for index in chosen for stamped in self._stamp(index, self._runners[index].stop())]

    def _stamp(self, lane: int, events: list[Event]) -> list[Stamped]:
        # as a file keeps it, so that a saved run reads the same
        stamped, clock = [], round(self._runners[lane].clock, 6)
        for event in events:
            for told in (*self._judged(lane, event), event):
                stamped.append(Stamped(lane, len(self.trace.events), clock, told))
                self.trace.append(stamped[-1])
        return stamped

    def _judged(self, lane: int, event: Event) -> list[Judged]:
        """What the judge says of a text that is about to end on its own. A canvas is no such text."""
        ends = isinstance(event, Done) and event.reason != "stopped" and not self.headers[lane].canvas
        return [self.judge(Result(self.trace.lane(lane)).text)] if self.judge and ends else []


def _read_together(lanes: list[Lane]) -> None:
    """Let lanes that begin with the same prompt read it once."""
    prefixes = SharedPrefixes(lanes)
    for lane in lanes:
        lane.prefixes = prefixes


def _shared(runner: Runner, other: Runner) -> bool:
    """Whether two lanes wait for forwards of one model that may be one."""
    models = {id(feed.stream.model) for feed in other.feeds if feed.plain}
    return all(feed.plain and id(feed.stream.model) in models for feed in runner.feeds)


def prepare(models: Models, recipes: list[LaneConfig], prompt: Prompt, limits: Limits,
            recorder: type[Recorder] = Recorder, memory: Memory | None = None, judge: Judge | None = None) -> Session:
    """A session ready to run. Raises Refusal where nothing can run; a single lane that cannot says so in its own place.
    """
    if not recipes:
        raise Refusal("There is no lane to run: add one.", "lanes")
    if not all(limits.stop):
        raise Refusal("A stop string is empty, and an empty text is everywhere: leave it away.", "stop")
    if limits.max_new_tokens < 1:
        raise Refusal("The length must be at least 1 token.", "max_new_tokens")
    ids = prompt.encode(models.target)
    headers, runners = [], []
    for index, recipe in enumerate(recipes):
        own = _own(limits, recipe)
        header = header_of(models, prompt, ids, own)
        header.lane, header.strategy, header.title, header.forced = (
            index,
            recipe.strategy,
            recipe.strategy,
            list(recipe.forced),
        )
        headers.append(header)
        try:
            assembly = assemble(recipe)
            _describe(header, assembly, models)
            lane = _lane(models, assembly, prompt, own, recorder, memory)
            header.memory = memory.digest() if memory and assembly.remembers() else ""
            header.canvas = getattr(lane, "length", 0)
            runners.append(Runner(lane, assembly))
        except Refusal as refusal:
            runners.append(Refused(str(refusal)))
    return Session(headers, runners, judge)


def _own(limits: Limits, recipe: LaneConfig) -> Limits:
    """The limits of one lane: what its text begins with, and its own seed where it has one."""
    seed = limits.seed if recipe.seed is None else recipe.seed
    return replace(limits, forced=tuple(recipe.forced), seed=seed)


def _lane(
    models: Models, assembly: Assembly, prompt: Prompt, limits: Limits, recorder: type[Recorder], memory: Memory | None
) -> Lane | Canvas:
    """What a decoder touches: text that grows, or a canvas that is filled. Raises Refusal where the model cannot do
    that.
    """
    check_fit(assembly.decoder, models.target)
    _check_forced(limits, models.target)
    ids, chosen, told = prompt.encode(models.target), models.by_stream(assembly), recorder(models.target.tokens)
    if assembly.decoder.kind == "canvas_decoder":
        return Canvas(ids, chosen, assembly, limits, told)
    others = _other_prompts(assembly, prompt, models.target)
    if "draft" in chosen and models.differences:
        others["draft"] = prompt.encode(models.draft)
    lane = Lane(ids, chosen, assembly, limits, told, others, memory)
    lane.passage = prompt.context.strip()
    lane.form = lambda text: replace(prompt, text=text, context="", before=()).encode(models.target)
    return lane


def _check_forced(limits: Limits, model: Model) -> None:
    """Raise Refusal for fixed tokens that the model does not have, and for more of them than the run generates."""
    if len(limits.forced) > limits.max_new_tokens:
        raise Refusal(
            f"The text begins with {len(limits.forced):,} fixed tokens, and the run generates {limits.max_new_tokens:,} at most: "
            "raise the number of tokens.",
            "forced",
        )
    unknown = next((token for token in limits.forced if not 0 <= token < model.vocabulary), None)
    if unknown is not None:
        raise Refusal(
            f"The text begins with token {quoted(unknown)}, and {model.name} has {model.vocabulary:,} tokens: take the text of this model.",
            "forced",
        )


def _other_prompts(assembly: Assembly, prompt: Prompt, model: Model) -> dict[str, list[int]]:
    """What streams over another prompt read, by name; raises Refusal where there is no context to leave away."""
    found = {
        name: prompt.instructed(text).encode(model)
        for sampler in assembly.samplers
        for name, text in sampler.instructions().items()
    }
    if "context" not in assembly.needs():
        return found
    if not prompt.context.strip():
        needing = assembly.needing("context")
        raise Refusal(f"{needing} needs a context, and there is none: give a passage as context.", "context")
    shorter = assembly.decoder.passages(prompt.context.strip(), prompt.text)
    found |= {name: replace(prompt, context=passage).encode(model) for name, passage in shorter.items()}
    return {**found, "without_context": prompt.without_context().encode(model)}


def header_of(models: Models, prompt: Prompt, ids: list[int], limits: Limits) -> Header:
    """What models, prompt and limits say of a lane; `ids` are the tokens it reads before it writes."""
    target = models.target
    return Header(
        model=target.name,
        revision=target.revision,
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device.type,
        quantization=target.quantization,
        seed=limits.seed,
        max_new_tokens=limits.max_new_tokens,
        stop=list(limits.stop),
        chat=prompt.chat,
        context=prompt.context,
        before=list(prompt.before),
        prompt=prompt.text,
        prompt_ids=ids,
        prompt_pieces=target.tokens.pieces(ids),
        vocabulary=target.vocabulary,
    )


def _describe(header: Header, assembly: Assembly, models: Models) -> None:
    decoder = assembly.decoder
    header.title, header.parts, header.guarantee = decoder.title, assembly.parts(), assembly.guarantee()
    header.reconstruction = any(part.reconstruction for part in assembly.strategies())
    if "draft" in assembly.needs() and models.draft:
        itself = models.draft.name == header.model and models.draft.quantization != header.quantization
        header.draft = models.draft.name + (f" in {models.draft.quantization}" if itself else "") + models.draft_place
