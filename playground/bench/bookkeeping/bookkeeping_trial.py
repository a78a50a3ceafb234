"""One strategy measured: CPU time outside forwards and bytes of events, at the prompt and per token after it."""
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from random import Random
from time import monotonic, thread_time
from typing import Any

from playground.algorithms.fairy_tales import tales
from playground.bench.bookkeeping.bookkeeping_defaults import BYTES, MILLISECONDS, Sizes
from playground.bench.bookkeeping.generated_model import generated_pair
from playground.bench.bookkeeping.strategy_lanes import lane_of
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session, prepare
from playground.errors import Refusal
from playground.events import Commit, Failed, Forward, Stamped
from playground.lane_fields import LaneConfig

QUESTION = "What came of it in the end"
SHORTEST = 512  # tokens of the prompt, for strategies with a limit of their own
STOPPED, ENDED = "It was stopped before its second round.", "Its text ended before its second round."
REPEATS = 3  # runs of a strategy
SLACK = 64  # tokens of the prompt besides the passage


@dataclass
class Bookkeeping:
    """Overhead of one strategy outside forwards. CPU time is that of the thread that runs the lane."""

    strategy: str
    lane: str
    prompt: int = 0  # tokens
    prompt_seconds: float = 0.0  # of the prompt and the first round
    prompt_bytes: int = 0
    seconds: float = 0.0  # after that
    bytes: int = 0
    tokens: int = 0  # committed, on all sequences
    rounds: int = 0  # forwards of the target after the first round
    rows: int = 0  # that these computed
    stopped: bool = False  # by the limit of time
    failure: str = ""

    @property
    def milliseconds(self) -> float:
        """Per token or round, whichever there are more of."""
        return 1000 * self.seconds / max(self.tokens, self.rounds, 1)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / max(self.tokens, 1)

    @property
    def excess(self) -> float:
        """By what factor the worse of both limits is exceeded; at most 1 if both are met."""
        return max(self.milliseconds / MILLISECONDS, self.bytes_per_token / BYTES)

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}


class BookkeepingTrial:
    """Measures strategies over one pair of model stand-ins."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self._target, self._draft = generated_pair(sizes)
        self._passages = {count: self._passage(count) for count in (sizes.context, sizes.watched, SHORTEST)}

    def measure(self, name: str) -> Bookkeeping:
        """Run a lane with this strategy, on the longest prompt that it reads without a failure and within the time.

        The fastest of several runs counts, unless they take long: other work on a machine slows a run down.

        Raises Refusal if there is no lane with this strategy.
        """
        lane = lane_of(name)
        for context in self._passages:
            start = monotonic()
            result = self._run(name, lane, context)
            if result.failure:
                continue
            if monotonic() - start < self.sizes.seconds / REPEATS:
                again = [self._run(name, lane, context) for _ in range(REPEATS - 1)]
                result = min([result, *again], key=lambda each: each.milliseconds)
            break
        return result

    def _run(self, name: str, lane: LaneConfig, context: int) -> Bookkeeping:
        result = Bookkeeping(name, " + ".join([lane.strategy, *(extra for extra, _ in lane.extras)]))
        models, limits = Models(self._target, self._draft), Limits(0, self.sizes.tokens)
        try:
            session = prepare(models, [lane], Prompt(QUESTION, context=self._passages[context]), limits)
        except Refusal as refusal:
            return replace(result, failure=str(refusal))
        result.prompt = len(session.headers[0].prompt_ids)
        self._advance(session, result)
        return result

    def _advance(self, session: Session, result: Bookkeeping) -> None:
        """Run a lane to its end, or to the limit of time."""
        end, meter = monotonic() + self.sizes.seconds, Meter(result)
        while not session.finished:
            before, start = self._target.stopwatch.spent, thread_time()
            stamped = session.advance()
            meter.add(stamped, thread_time() - start - (self._target.stopwatch.spent - before))
            if monotonic() > end:
                session.stop()
                result.stopped = True
        if not (result.rounds or result.failure):
            result.failure = STOPPED if result.stopped else ENDED

    def _passage(self, count: int) -> str:
        """A passage of almost `count` tokens: the bundled tales, then their sentences in random order."""
        sentences, text, random = tales().split(". "), tales(), Random(0)
        encode = self._target.tokens.encode
        while len(ids := encode(text)) < count:
            text += ". ".join(random.sample(sentences, len(sentences)))
        return self._target.tokenizer.decode(ids[:count - SLACK])


class Meter:
    """Adds what a lane costs to a result: to the prompt until the first round after it is over, then per token."""

    def __init__(self, result: Bookkeeping):
        self._result, self._warm = result, False

    def add(self, stamped: list[Stamped], seconds: float) -> None:
        """Add one advance of a session."""
        result, events = self._result, [item.event for item in stamped]
        forwards = [event for event in events if isinstance(event, Forward)]
        decoded = [event for event in forwards if event.stream == "target" and event.phase == "decode"]
        result.failure = next((event.message for event in events if isinstance(event, Failed)), result.failure)
        if not self._warm or any(event.phase == "prefill" for event in forwards):
            self._warm = self._warm or bool(decoded)
            result.prompt_seconds += seconds
            result.prompt_bytes += _size(stamped)
            return
        result.rounds += len(decoded)
        result.rows += sum(event.tokens for event in decoded)
        result.seconds += seconds
        result.bytes += _size(stamped)
        result.tokens += _committed(events)


def _size(stamped: list[Stamped]) -> int:
    """Bytes of these events in a saved trace."""
    return sum(len(json.dumps(item.to_json(), separators=(",", ":"))) + 1 for item in stamped)


def _committed(events: Iterable[Any]) -> int:
    return sum(len(event.ids) for event in events if isinstance(event, Commit) and not event.grown_on)
