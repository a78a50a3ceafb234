"""The scheduler: runs lanes side by side, one forward at a time, always serving the lane that has done the least work.

Lanes with a similar amount of work that wait for the same model share a forward, each with its own rows and KV cache.
Four lanes therefore take less time than four runs. Work is computed from the shapes of forwards and not measured: in
half precision a row rounds differently in a shared forward, so measured times would decide what a seed generates. A
lane's clock is the measured sum of its shares. A common prompt is read once (`shared_prefix`). A session is a
synchronous object without threads; it pauses while its caller does not call `advance`.

    session = prepare(models, [LaneConfig("greedy"), LaneConfig("speculative")], Prompt("Once"), Limits())
    for stamped in session: ...
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch

from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble, check_context, title_of
from playground.decoding.canvas import Canvas, check_fit
from playground.decoding.checkpoint_sampler import add_settings, note_settings, with_stops
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import LaneRun, Refused, Runner, advance, batchable
from playground.decoding.limits import Limits
from playground.decoding.models import AnyModel, Models, continuing
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Recorder
from playground.decoding.shared_prefix import SharedPrefixes
from playground.decoding.visitor_memory import Memory
from playground.decoding.weight_figures import draw_weights, shown_card
from playground.errors import Refusal
from playground.events import Commit, Done, Event, Fill, Header, Judged, Part, Stamped
from playground.request_limits import quoted
from playground.trace import Trace
from playground.trace.result import Result

LEAD = 4.0  # forwards of one row that a lane may be ahead of the one with the least work for the two to share a forward
SERVER_PATIENCE = 0.01  # seconds that a session waits for a server if it has nothing else to do
Judge = Callable[[str], Judged]  # scores a text as the answer to the prompt


@cache
def leave_a_core() -> None:
    """Limit torch to all CPU cores but one, which is left to the server and the browser.

    The threads synchronise many times per token, so one thread that shares its core slows down all of them. Call it
    before the first forward. It does nothing if OMP_NUM_THREADS is set.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))


class Session:
    """Lanes over one prompt. `trace` grows while they run. A `judge` scores the text of every lane that completes."""

    def __init__(self, headers: list[Header], runners: Sequence[LaneRun], judge: Judge | None = None):
        self.trace = Trace(headers)
        self._runners, self.judge = list(runners), judge
        _share_prefixes(
            [runner.lane for runner in runners if isinstance(runner, Runner) and isinstance(runner.lane, Lane)]
        )

    def add(self, header: Header, runner: LaneRun) -> None:
        """Add a lane before the run begins; its header gets the next number."""
        header.lane = len(self.headers)
        self.trace = Trace([*self.headers, header])
        self._runners.append(runner)

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
        """Run the live lane with the least work, and those that share its forward, up to their next forwards.

        Returns their events; empty when all lanes are finished.
        """
        return self._turn(self._live())

    def step(self) -> list[Stamped]:
        """Run every live lane up to its next commit, inclusive. Remote lanes that have nothing are not waited for."""
        stamped: list[Stamped] = []
        waiting = self._live()
        while waiting:
            new = self._turn(waiting)
            if not new and not self._local(waiting):
                break
            committed = {s.lane for s in new if isinstance(s.event, (Commit, Fill))}
            waiting = [lane for lane in waiting if lane not in committed and not self._runners[lane].finished]
            stamped += new
        return stamped

    def _turn(self, lanes: list[int]) -> list[Stamped]:
        """Choose some of these lanes, run their forwards and strategies, and record what happened."""
        chosen = self._chosen(lanes)
        events = advance([self._runners[lane] for lane in chosen])
        return [stamped for lane, own in zip(chosen, events) for stamped in self._stamp(lane, own)]

    def _chosen(self, lanes: list[int]) -> list[int]:
        """Those that go on now, of lanes that have done hardly more work than the one with the least.

        This is one that needs no forward, if any, and otherwise all that can share a batch with the lane with the
        least work. Remote lanes, whose servers compute meanwhile, go first if they have new events.
        """
        runners, local = self._runners, self._local(lanes)
        patience = 0.0 if local else SERVER_PATIENCE
        arrived = [lane for lane in lanes if runners[lane].remote and runners[lane].arrived(patience)]
        if arrived or not local:
            return arrived
        if len(local) == 1:
            return local
        slowest = min(local, key=lambda lane: runners[lane].work)
        similar = [lane for lane in local if runners[lane].work <= runners[slowest].work + LEAD]
        ready = [lane for lane in similar if not runners[lane].feeds]
        return ready[:1] or [
            lane for lane in similar if lane == slowest or batchable(runners[lane], runners[slowest])
        ]

    def _local(self, lanes: list[int]) -> list[int]:
        return [lane for lane in lanes if not self._runners[lane].remote]

    def cache_bytes(self) -> int:
        """Memory of the KV caches of all lanes, ended ones included."""
        return sum(runner.lane.cache_bytes() for runner in self._runners if isinstance(runner, Runner))

    def stop(self, lane: int | None = None) -> list[Stamped]:
        """End one lane, or all of them."""
        chosen = range(len(self._runners)) if lane is None else [lane]
        return [stamped for index in chosen for stamped in self._stamp(index, self._runners[index].stop())]

    def _stamp(self, lane: int, events: list[Event]) -> list[Stamped]:
        """Record events; the score of a completed text comes before its Done."""
        if self.judge is None or not (events and self._completes_a_text(lane, events[-1])):
            return self._recorded(lane, events)
        text = self._recorded(lane, events[:-1])
        score = self.judge(Result(self.trace.lane(lane)).text)
        return text + self._recorded(lane, [score, events[-1]])

    def _completes_a_text(self, lane: int, event: Event) -> bool:
        """Whether an event completes a text that can be scored. Those of stopped lanes and of canvases cannot."""
        return isinstance(event, Done) and event.reason != "stopped" and not self.headers[lane].canvas

    def _recorded(self, lane: int, events: list[Event]) -> list[Stamped]:
        clock, first = round(self._runners[lane].clock, 6), len(self.trace.events)  # rounded as in a saved trace
        stamped = [Stamped(lane, first + index, clock, event) for index, event in enumerate(events)]
        self.trace.extend(stamped)
        return stamped


def _share_prefixes(lanes: list[Lane]) -> None:
    """Let lanes with the same prompt read it once."""
    prefixes = SharedPrefixes(lanes)
    for lane in lanes:
        lane.prefixes = prefixes


def prepare(models: Models, configs: list[LaneConfig], prompt: Prompt, limits: Limits,
            recorder: type[Recorder] = Recorder, memory: Memory | None = None, judge: Judge | None = None) -> Session:
    """Prepare a session. Raises Refusal if nothing can run; if a single lane cannot run, that lane fails."""
    if not configs:
        raise Refusal("There is no lane to run: add one.", "lanes")
    limits.check()
    ids = prompt.encode(models.target)
    remarks = prompt.remarks(models.target, ids)
    headers: list[Header] = []
    runners: list[LaneRun] = []
    for index, config in enumerate(configs):
        lane_limits = _limits_of(limits, config)
        header = header_of(models, prompt, ids, lane_limits)
        header.lane, header.strategy, header.title = index, config.strategy, title_of(config.strategy)
        header.forced, header.forked_at = list(config.forced), config.forked_at
        header.remarks = remarks
        headers.append(header)
        try:
            lane_limits.check()
            assembly = assemble(config)
            own = models.with_weights(config.weights)
            assembly.attends = not assembly.cache_policy or own.target.fills or own.target.attends
            lane_limits = _with_settings(assembly, own.target, lane_limits, len(ids))
            header.stop = list(lane_limits.stop)
            _describe(header, assembly, own)
            if own is not models:
                header.quantization = own.target.quantization
                header.parts = [*header.parts, Part(config.weights, "weights", shown_card(own.target))]
            asked = _asked(prompt, ids, assembly, own)
            if asked != prompt:
                _describe_prompt(header, asked, own.target)
            lane = _new_lane(own, assembly, asked, lane_limits, recorder, memory)
            note_settings(lane, own.target)
            draw_weights(lane, own.target)
            header.memory = memory.digest() if memory and assembly.remembers() else ""
            header.canvas = lane.length if isinstance(lane, Canvas) else 0
            runners.append(Runner(lane, assembly))
        except Refusal as refusal:
            runners.append(Refused(str(refusal)))
    return Session(headers, runners, judge)


def _with_settings(assembly: Assembly, target: AnyModel, limits: Limits, prompt: int) -> Limits:
    """The limits with the stop strings of the checkpoint, whose other settings the lane applies."""
    settings = getattr(target, "settings", None)  # a canvas has none
    add_settings(assembly, settings, prompt + limits.max_new_tokens)
    return with_stops(limits, settings)


def _asked(prompt: Prompt, ids: list[int], assembly: Assembly, models: Models) -> Prompt:
    """The prompt with the tools that the lane's constraint wants described, unless others are, and without the tokens
    that a sampler takes back.
    """
    tools = assembly.constraint.tools_to_describe() if assembly.constraint else ""
    asked = replace(prompt, tools=tools) if tools and not prompt.tools else prompt
    return asked if asked.chat else replace(asked, taken_back=_taken_back(ids, assembly, models))


def _taken_back(ids: list[int], assembly: Assembly, models: Models) -> int:
    """How many tokens at the end of the prompt the lane's samplers take back. Raises Refusal where they cannot be."""
    for sampler in assembly.samplers:
        if not (count := sampler.take_back(ids, models.target)):
            continue
        if assembly.constraint:
            raise Refusal(
                f"{sampler.title} writes the end of the prompt again, and {assembly.constraint.title} constrains the "
                "text from its beginning: use one of them.",
                sampler.name,
            )
        if "draft" in assembly.needs() and models.differences:
            raise Refusal(
                f"{sampler.title} takes tokens of the prompt back, which the draft model divides differently: choose "
                "a draft model with the target's tokenizer.",
                sampler.name,
            )
        return count
    return 0


def _describe_prompt(header: Header, prompt: Prompt, model: AnyModel) -> None:
    """Replace the facts about the prompt of a header."""
    header.tools, header.prompt_ids = prompt.tools, prompt.encode(model)
    header.prompt_pieces = model.tokens.pieces(header.prompt_ids)


def _limits_of(limits: Limits, config: LaneConfig) -> Limits:
    """The limits of one lane: with its forced tokens, and its own seed if it has one."""
    seed = limits.seed if config.seed is None else config.seed
    return replace(limits, forced=tuple(config.forced), seed=seed)


def _new_lane(
    models: Models, assembly: Assembly, prompt: Prompt, limits: Limits, recorder: type[Recorder], memory: Memory | None
) -> Lane | Canvas:
    """The object that the decoder receives: a Lane or a Canvas. Raises Refusal if the model does not support it."""
    check_fit(assembly.decoder, models.target)
    _check_forced(limits, models.target)
    ids, draft = prompt.encode(models.target), models.draft_for(assembly)
    lane_recorder = recorder(models.target.tokens)
    if assembly.decoder.kind == "canvas_decoder":
        return Canvas(ids, {"target": models.denoiser}, assembly, limits, lane_recorder)
    others = _other_prompts(assembly, prompt, models.target)
    if draft and models.differences:
        others["draft"] = prompt.tokens(draft)
    lane = Lane(ids, models.by_stream(assembly), assembly, limits, lane_recorder, others, memory, models.heads)
    lane.loaded_model = continuing(models.loaded or models.target)
    lane.question, lane.passage = prompt.text, prompt.context.strip()
    lane.form = lambda text: replace(prompt, text=text, context="", before=(), taken_back=0).encode(models.target)
    return lane


def _check_forced(limits: Limits, model: AnyModel) -> None:
    """Raise Refusal for fixed tokens that the model does not have, and for more of them than the run generates."""
    if len(limits.forced) > limits.max_new_tokens:
        raise Refusal(
            f"The text begins with {len(limits.forced):,} fixed tokens, and the run generates at most "
            f"{limits.max_new_tokens:,}: raise the number of tokens.",
            "forced",
        )
    unknown = next((token for token in limits.forced if not 0 <= token < model.vocabulary), None)
    if unknown is not None:
        raise Refusal(
            f"The text begins with token {quoted(unknown)}, and {model.name} has {model.vocabulary:,} tokens: "
            "use tokens of this model.",
            "forced",
        )


def _other_prompts(assembly: Assembly, prompt: Prompt, model: AnyModel) -> dict[str, list[int]]:
    """The other prompts by stream. Raises Refusal if a strategy needs a passage and the prompt has none."""
    found = {
        name: prompt.instructed(text).encode(model)
        for sampler in assembly.samplers
        for name, text in sampler.instructions().items()
    }
    bare = {name for sampler in assembly.samplers for name in sampler.unprompted}
    found |= {name: prompt.encode(model)[-1:] for name in bare}
    if "context" not in assembly.needs():
        return found
    check_context(assembly, prompt.context)
    shorter = assembly.decoder.passages(prompt.context.strip(), prompt.text)
    found |= {name: replace(prompt, context=passage).encode(model) for name, passage in shorter.items()}
    return {**found, "without_context": prompt.without_context().encode(model)}


def header_of(models: Models, prompt: Prompt, ids: list[int], limits: Limits) -> Header:
    """A header with the facts about models, prompt and limits; `ids` are the tokens of the prompt."""
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
        form=prompt.form,
        tools=prompt.tools,
        prompt=prompt.text,
        prompt_ids=ids,
        prompt_pieces=target.tokens.pieces(ids),
        vocabulary=target.vocabulary,
        thinking=list(target.tokens.thinking_tags() or ()),
    )


def _describe(header: Header, assembly: Assembly, models: Models) -> None:
    """Add the facts about the strategies to a header."""
    header.title, header.parts, header.guarantee = assembly.title(), assembly.parts(), assembly.claims()
    header.reconstruction = any(part.reconstruction for part in assembly.strategies())
    header.thinking = list(assembly.decoder.thinking_tags() or header.thinking)
    if "draft" in assembly.needs() and models.draft:
        own = models.draft.quantization
        differs = own != header.quantization and (own != "none" or models.draft.name == header.model)
        quantization = f" in {own}" if differs else ""
        header.draft = models.draft.name + quantization + models.draft_place
