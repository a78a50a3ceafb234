"""What a lane achieved and what it cost: functions of its trace, each with its definition in its docstring.

Every function after `metrics` that takes a Record is one metric. None means that a metric has no meaning for the lane,
such as acceptance where nothing was guessed. Counts of tokens follow rollbacks. Imports neither torch nor gradio.
"""
from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from playground.events import Cache, Commit, Done, Draft, Event, Fill, Forward, Mask, Reason, Stamped, Verdict
from playground.trace.transcript import Token, Written, sequences

if TYPE_CHECKING:
    from playground.trace.recorded_trace import Trace

Kind = TypeVar("Kind", bound=Event)


@dataclass
class LaneRecord:
    """One lane as the metrics read it."""

    stamped: list[Stamped]

    @cached_property
    def written(self) -> Written:
        return sequences(self.stamped)[0]

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [stamped.event for stamped in self.stamped if isinstance(stamped.event, kind)]

    def forwards(self, stream: str) -> list[Stamped]:
        """Passes of one stream, prefill excluded."""
        return [
            s
            for s in self.stamped
            if isinstance(s.event, Forward) and s.event.stream == stream and s.event.phase != "prefill"
        ]

    def trials(self) -> list[tuple[int, bool]]:
        """Depth in its draft tree, 1 for the first guess, and fate of every guess that was tested, once or more. Kept:
        it is on the kept path.
        """
        drafts = {(draft.sequence, draft.round): draft for draft in self.of(Draft)}
        verdicts = [(verdict, drafts.get((verdict.sequence, verdict.round))) for verdict in self.of(Verdict)]
        tested = (
            (draft, node, node in verdict.kept)
            for verdict, draft in verdicts
            if draft
            for node in dict.fromkeys(test.node for test in verdict.tests)
        )
        return [(_depth(draft, node), kept) for draft, node, kept in tested]


def metrics(trace: Trace) -> dict[str, Any]:
    """Every metric of a sound trace of one lane, by name; raises ValueError for more lanes or none."""
    record = LaneRecord(_only_lane(trace))
    return {name: metric(record) for name, metric in METRICS.items()}


def definitions() -> dict[str, str]:
    """What each metric means, for people, by name."""
    return {name: " ".join(inspect.getdoc(metric).split()) for name, metric in METRICS.items()}


def tokens(record: LaneRecord) -> int:
    """Tokens of the text as it stands at the end, forced ones and a committed end token included."""
    return len(record.written.tokens)


def seconds(record: LaneRecord) -> float:
    """The lane's own clock at its last event: the sum of its requests, prefill included."""
    return record.stamped[-1].at if record.stamped else 0.0


def tokens_per_second(record: LaneRecord) -> float | None:
    """Tokens over seconds, prefill included."""
    return _ratio(tokens(record), seconds(record))


def time_to_first_token(record: LaneRecord) -> float | None:
    """The lane's clock, in seconds, when its text first got a token."""
    return next(
        (s.at for s in record.stamped if isinstance(s.event, Commit) and s.event.sequence == 0 and s.event.ids), None
    )


def forwards(record: LaneRecord) -> dict[str, int]:
    """Passes of each stream, catching up included, prefill excluded."""
    return dict(Counter(forward.stream for forward in record.of(Forward) if forward.phase != "prefill"))


def target_forwards(record: LaneRecord) -> int:
    """Passes of the target, prefill excluded."""
    return len(record.forwards("target"))


def draft_forwards(record: LaneRecord) -> int:
    """Passes that only guess: of the draft model, catching up included, or of the target's first layers; prefill
    excluded.
    """
    return len(record.forwards("draft")) + len(record.forwards("exit"))


def tokens_per_target_forward(record: LaneRecord) -> float | None:
    """Tokens of the text that were committed after the first pass of the target, over its passes; prefill left out of
    both.

    The bonus token counts. The token that came straight from the prefill row does not, nor does a last pass that
    nothing was committed after, as when a person stops the lane: plain greedy decoding gives exactly 1.
    """
    last = max((s.seq for s in record.stamped if isinstance(s.event, Commit)), default=-1)
    passes = [s.seq for s in record.forwards("target") if s.seq < last]
    return _ratio(sum(token.seq > passes[0] for token in record.written.tokens), len(passes)) if passes else None


def acceptance_rate(record: LaneRecord) -> float | None:
    """Accepted over tested guesses. A guess is tested when the verifier looked at it, accepted when it is on the kept
    path.
    """
    fates = [kept for _, kept in record.trials()]
    return _ratio(sum(fates), len(fates))


def acceptance_by_position(record: LaneRecord) -> list[float | None] | None:
    """Accepted over tested guesses at each depth of the draft tree, from the first guess on."""
    trials = record.trials()
    at = [[kept for depth, kept in trials if depth == d] for d in range(1, max((d for d, _ in trials), default=0) + 1)]
    return [_ratio(sum(fates), len(fates)) for fates in at] or None


def mean_accepted(record: LaneRecord) -> float | None:
    """Guesses that stood, per verdict; the token that follows them is not one."""
    return _mean([len(verdict.kept) for verdict in record.of(Verdict)])


def mean_entropy(record: LaneRecord) -> float | None:
    """Entropy in nats of the raw rows that the tokens of the text were chosen from, over those whose row was recorded.
    """
    return _mean([step.entropy for position, step in record.written.steps.items() if position < tokens(record)])


def kv_live_peak(record: LaneRecord) -> int | None:
    """Most live slots that any KV head of any layer of the target held after a keep."""
    return max(
        (_slots(runs) for cache in _target_caches(record) for layer in cache.live for runs in layer), default=None
    )


def kv_bytes_peak(record: LaneRecord) -> int | None:
    """Most bytes that the target's cache held after a keep, a prompt that is held once for several lanes included."""
    return max((cache.bytes for cache in _target_caches(record)), default=None)


def mask_seconds_per_token(record: LaneRecord) -> float | None:
    """Seconds spent on making grammar masks, over tokens."""
    masks = record.of(Mask)
    return _ratio(sum(mask.seconds for mask in masks), tokens(record)) if masks else None


def wasted_tokens(record: LaneRecord) -> int | None:
    """Rows that the target computed and the text did not need: refused guesses, dropped branches, tokens taken back.

    A text needs one row for each token but the last, which nothing follows. Prefill is left out. A canvas has no such
    rows.
    """
    if record.of(Fill):
        return None
    rows = sum(stamped.event.tokens for stamped in record.forwards("target"))
    return max(0, rows - max(0, tokens(record) - 1))


def flops(record: LaneRecord) -> float:
    """Floating-point operations of all passes of all streams, prefill included, computed from their shapes."""
    return sum(forward.flops for forward in record.of(Forward))


def origins(record: LaneRecord) -> dict[str, int]:
    """Tokens of the text by where they came from: sampled, draft, forced, redraw, bonus."""
    return dict(Counter(token.origin for token in record.written.tokens))


METRICS: dict[str, Callable[[LaneRecord], Any]] = {metric.__name__: metric for metric in (
    tokens, seconds, tokens_per_second, time_to_first_token, forwards, target_forwards, draft_forwards,
    tokens_per_target_forward, acceptance_rate, acceptance_by_position, mean_accepted, mean_entropy, kv_live_peak,
    kv_bytes_peak, mask_seconds_per_token, wasted_tokens, flops, origins)}


@dataclass(frozen=True)
class Difference:
    """Where two texts part. `a` or `b` is None where that text has already ended; then they agree as far as they go."""

    index: int  # among the generated tokens
    a: Token | None
    b: Token | None
    # log p(a) - log p(b), raw, in nats, which is their distance in logits; None where no row shows both
    margin: float | None
    reason: Reason | None = None  # why the shorter text ended

    @property
    def prefix(self) -> bool:
        return self.a is None or self.b is None

    def sentence(self) -> str:
        if self.prefix:
            why = " at its length limit" if self.reason == "length" else ""
            return f"The first {self.index} tokens are the same; there the {'first' if self.a is None else 'second'} text ends{why}."
        apart = "no row shows both" if self.margin is None else f"their logits lie {abs(self.margin):.3g} apart"
        return f"Token {self.index} is {self.a.piece!r} in the first text and {self.b.piece!r} in the second; {apart}."


def diff(a: Trace, b: Trace) -> Difference | None:
    """First place where the texts of two traces of one lane each differ; None where they are the same."""
    first, second = (sequences(_only_lane(trace))[0] for trace in (a, b))
    pairs = zip(first.tokens, second.tokens, strict=False)
    index = next((i for i, (x, y) in enumerate(pairs) if x.id != y.id), min(len(first.tokens), len(second.tokens)))
    x, y = _token(first, index), _token(second, index)
    if x is None and y is None:
        return None
    reason = _reason(a if x is None else b) if x is None or y is None else None
    return Difference(index, x, y, _margin([first, second], index, x, y), reason)


def _margin(texts: list[Written], index: int, x: Token | None, y: Token | None) -> float | None:
    """From the first of the texts whose row at `index` shows both tokens; up to there both texts are the same."""
    for text in texts if x and y else []:
        raw = {candidate.id: candidate.raw for candidate in text.steps[index].top} if index in text.steps else {}
        if raw.get(x.id) and raw.get(y.id):
            return math.log(raw[x.id] / raw[y.id])
    return None


def _reason(trace: Trace) -> Reason | None:
    return next((s.event.reason for s in trace.events if isinstance(s.event, Done)), None)


def _token(text: Written, index: int) -> Token | None:
    return text.tokens[index] if index < len(text.tokens) else None


def _only_lane(trace: Trace) -> list[Stamped]:
    if len(trace.headers) != 1:
        raise ValueError(f"expected the trace of one lane, got {len(trace.headers)}; take one with trace.lane(i)")
    return trace.events


def _target_caches(record: LaneRecord) -> list[Cache]:
    return [cache for cache in record.of(Cache) if cache.stream == "target"]


def _slots(runs: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in runs)


def _depth(draft: Draft, node: int) -> int:
    depth = 1
    # a parent comes before its child; without the second half a broken trace never ends
    while 0 <= draft.parents[node] < node:
        node, depth = draft.parents[node], depth + 1
    return depth


def _mean(values: list[float]) -> float | None:
    return _ratio(sum(values), len(values))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
