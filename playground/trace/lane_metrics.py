"""Metrics of a lane, computed from its trace. The docstring of each function defines its metric.

METRICS lists them. None means that a metric is not defined for the lane, such as the acceptance rate without draft
tokens. Token counts take rollbacks into account. Imports neither torch nor gradio.
"""
from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from playground.events import Cache, Commit, Done, Draft, Event, Fill, Forward, Header, Mask, Reason, Stamped, Verdict
from playground.trace.cache_contents import live_counts
from playground.trace.thinking import ThinkingSpan, thinking_parts
from playground.trace.transcript import Token, Written, sequences

if TYPE_CHECKING:
    from playground.trace.recorded_trace import Trace

Kind = TypeVar("Kind", bound=Event)


@dataclass
class LaneRecord:
    """The events of one lane, with the queries that metrics need."""

    stamped: list[Stamped]
    header: Header = field(default_factory=Header)

    @cached_property
    def written(self) -> Written:
        return sequences(self.stamped)[0]

    @cached_property
    def thinking(self) -> list[ThinkingSpan]:
        return thinking_parts(self.header, [token.piece or "" for token in self.written.tokens])

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [stamped.event for stamped in self.stamped if isinstance(stamped.event, kind)]

    def forwards(self, stream: str) -> list[Stamped]:
        """Forwards of one stream, prefill excluded."""
        return [
            s
            for s in self.stamped
            if isinstance(s.event, Forward) and s.event.stream == stream and s.event.phase != "prefill"
        ]

    def trials(self) -> list[tuple[int, bool]]:
        """For every draft token that was tested: its depth in the draft tree, from 1, and whether it was accepted.

        It is accepted if it is on the accepted path. A token that was tested several times counts once.
        """
        drafts = {(draft.sequence, draft.round): draft for draft in self.of(Draft)}
        verdicts = [(verdict, drafts.get((verdict.sequence, verdict.round))) for verdict in self.of(Verdict)]
        tested = (
            (draft, node, node in verdict.kept)
            for verdict, draft in verdicts
            if draft
            for node in dict.fromkeys(test.node for test in verdict.tests)
        )
        return [(_depth(draft, node), accepted) for draft, node, accepted in tested]


def metrics(trace: Trace) -> dict[str, Any]:
    """All metrics of a consistent trace of one lane, by name. Raises ValueError unless there is exactly one lane."""
    record = LaneRecord(_only_lane(trace), trace.headers[0])
    found = {name: metric(record) for name, metric in METRICS.items()}
    return found | dict.fromkeys(OF_FORWARDS) if trace.headers[0].remote else found


def definitions() -> dict[str, str]:
    """The definition of each metric, by name."""
    return {name: " ".join((inspect.getdoc(metric) or "").split()) for name, metric in METRICS.items()}


def tokens(record: LaneRecord) -> int:
    """Tokens of the final text, forced tokens and a committed end token included."""
    return len(record.written.tokens)


def thinking_tokens(record: LaneRecord) -> int | None:
    """Tokens of the text's thinking parts, their tags included. Not defined for a text without one."""
    parts = record.thinking
    return sum(part.end - part.first for part in parts) if parts else None


def answer_tokens(record: LaneRecord) -> int | None:
    """Tokens outside the thinking parts, a committed end token included. Not defined for a text without such a part."""
    thought = thinking_tokens(record)
    return None if thought is None else tokens(record) - thought


def seconds(record: LaneRecord) -> float:
    """The lane's clock at its last event: the sum of its requests, prefill included."""
    return record.stamped[-1].at if record.stamped else 0.0


def tokens_per_second(record: LaneRecord) -> float | None:
    """Tokens over seconds, prefill included."""
    return _ratio(tokens(record), seconds(record))


def time_to_first_token(record: LaneRecord) -> float | None:
    """Seconds on the lane's clock at the first commit to its text."""
    return next(
        (s.at for s in record.stamped if isinstance(s.event, Commit) and s.event.sequence == 0 and s.event.ids), None
    )


def forwards(record: LaneRecord) -> dict[str, int]:
    """Forwards of each stream, catching up included, prefill excluded."""
    return dict(Counter(forward.stream for forward in record.of(Forward) if forward.phase != "prefill"))


def target_forwards(record: LaneRecord) -> int:
    """Forwards of the target, prefill excluded."""
    return len(record.forwards("target"))


def draft_forwards(record: LaneRecord) -> int:
    """Forwards that only draft, prefill excluded: of the draft model, catching up included, of an early exit, or of
    rows that enter at a later layer.
    """
    return sum(len(record.forwards(stream)) for stream in ("draft", "exit", "resumed"))


def tokens_per_target_forward(record: LaneRecord) -> float | None:
    """Tokens committed after the target's first forward, divided by its forwards; the prefill is excluded from both.

    Bonus tokens count. The token sampled from the prefill does not, nor does a last forward without a commit after it,
    as when the lane is stopped. Greedy decoding gives exactly 1.
    """
    last = max((s.seq for s in record.stamped if isinstance(s.event, Commit)), default=-1)
    used = [s.seq for s in record.forwards("target") if s.seq < last]
    return _ratio(sum(token.seq > used[0] for token in record.written.tokens), len(used)) if used else None


def acceptance_rate(record: LaneRecord) -> float | None:
    """Accepted draft tokens divided by those the verifier tested. Accepted tokens are those on the accepted path."""
    outcomes = [accepted for _, accepted in record.trials()]
    return _ratio(sum(outcomes), len(outcomes))


def acceptance_by_position(record: LaneRecord) -> list[float | None] | None:
    """Acceptance rate at each depth of the draft tree, from the first draft token on."""
    trials = record.trials()
    deepest = max((depth for depth, _ in trials), default=0)
    by_depth = [[accepted for depth, accepted in trials if depth == d] for d in range(1, deepest + 1)]
    return [_ratio(sum(outcomes), len(outcomes)) for outcomes in by_depth] or None


def mean_accepted(record: LaneRecord) -> float | None:
    """Accepted draft tokens per round, without the token that follows them."""
    return _mean([len(verdict.kept) for verdict in record.of(Verdict)])


def mean_entropy(record: LaneRecord) -> float | None:
    """Mean entropy in nats, before masks and samplers, over the tokens of the text whose distribution was recorded."""
    return _mean([step.entropy for position, step in record.written.steps.items() if position < tokens(record)])


def kv_live_peak(record: LaneRecord) -> int | None:
    """Most live slots of any KV head of any layer of the target after a commit."""
    return max((count for counts in live_counts(_target_caches(record)) for count in counts), default=None)


def kv_bytes_peak(record: LaneRecord) -> int | None:
    """Largest size in bytes of the target's KV cache after a commit, including a prefix shared by several lanes."""
    return max((cache.bytes for cache in _target_caches(record)), default=None)


def mask_seconds_per_token(record: LaneRecord) -> float | None:
    """Seconds spent computing grammar masks, divided by tokens."""
    masks = record.of(Mask)
    return _ratio(sum(mask.seconds for mask in masks), tokens(record)) if masks else None


def wasted_tokens(record: LaneRecord) -> int | None:
    """Rows that the target computed for rejected draft tokens, dropped branches and tokens rolled back.

    A text needs one row for each token except the last. The prefill is excluded. Not defined for a canvas.
    """
    if record.of(Fill):
        return None
    decoding = [each for each in record.of(Forward) if each.stream == "target" and each.phase != "prefill"]
    rows = sum(each.tokens for each in decoding)
    return max(0, rows - max(0, tokens(record) - 1))


def flops(record: LaneRecord) -> float:
    """Floating-point operations of all forwards of all streams, prefill included, computed from their shapes."""
    return sum(forward.flops for forward in record.of(Forward))


def origins(record: LaneRecord) -> dict[str | None, int]:
    """Tokens of the text by origin: sampled, draft, forced, redraw, bonus."""
    return dict(Counter(token.origin for token in record.written.tokens))


METRICS: dict[str, Callable[[LaneRecord], Any]] = {metric.__name__: metric for metric in (
    tokens, thinking_tokens, answer_tokens, seconds, tokens_per_second, time_to_first_token, forwards,
    target_forwards, draft_forwards, tokens_per_target_forward, acceptance_rate, acceptance_by_position,
    mean_accepted, mean_entropy, kv_live_peak, kv_bytes_peak, mask_seconds_per_token, wasted_tokens, flops, origins)}

OF_FORWARDS = ("forwards", "target_forwards", "draft_forwards", "wasted_tokens", "flops")
"""Metrics that are None for a lane on a server, which does not report its forwards."""


@dataclass(frozen=True)
class Difference:
    """The first token in which two texts differ. If one text ends there, being a prefix, its token is None."""

    index: int  # among the generated tokens
    a: Token | None
    b: Token | None
    margin: float | None  # log p(a) - log p(b), raw, in nats: the difference of their logits; None if not recorded
    reason: Reason | None = None  # why the shorter text ended

    @property
    def prefix(self) -> bool:
        """Whether one text is a prefix of the other."""
        return self.a is None or self.b is None

    def sentence(self) -> str:
        """The difference in words."""
        if self.a is None or self.b is None:
            why = " at its length limit" if self.reason == "length" else ""
            which = "first" if self.a is None else "second"
            return f"The first {self.index} tokens are the same; then the {which} text ends{why}."
        apart = (
            "no step lists both" if self.margin is None else f"their logits differ by {abs(self.margin):.3g}"
        )
        return f"Token {self.index} is {self.a.piece!r} in the first text and {self.b.piece!r} in the second; {apart}."


def diff(a: Trace, b: Trace) -> Difference | None:
    """The first difference between the texts of two traces of one lane each; None if they are the same."""
    first, second = (sequences(_only_lane(trace))[0] for trace in (a, b))
    if _lacks_ids(first) or _lacks_ids(second):
        return _diff_of_texts(first, second)
    pairs = zip(first.tokens, second.tokens, strict=False)
    index = next((i for i, (x, y) in enumerate(pairs) if x.id != y.id), min(len(first.tokens), len(second.tokens)))
    x, y = _token(first, index), _token(second, index)
    if x is None and y is None:
        return None
    reason = _reason(a if x is None else b) if x is None or y is None else None
    return Difference(index, x, y, _margin([first, second], index, x, y), reason)


def _lacks_ids(written: Written) -> bool:
    """Whether a server generated the text and reported no ids."""
    return any(token.id < 0 for token in written.tokens)


def _diff_of_texts(first: Written, second: Written) -> Difference | None:
    """The first difference of two texts character by character, since their tokens cannot be compared. The index is
    that of the first text's token.
    """
    if first.text == second.text:
        return None
    pairs = zip(first.text, second.text, strict=False)
    place = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(first.text), len(second.text)))
    index, other = (_token_at(written, place) for written in (first, second))
    return Difference(index, _token(first, index), _token(second, other), None)


def _token_at(written: Written, place: int) -> int:
    """Index of the token that spells the character at `place`; the number of tokens if the text ends before it."""
    ends = accumulate(len(token.piece) for token in written.tokens)
    return next((i for i, end in enumerate(ends) if end > place), len(written.tokens))


def _margin(texts: list[Written], index: int, x: Token | None, y: Token | None) -> float | None:
    """From the first text whose candidates at `index` include both tokens; before `index` both texts are the same."""
    if x is None or y is None:
        return None
    for text in texts:
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


def _depth(draft: Draft, node: int) -> int:
    depth = 1
    # a parent comes before its child; the second condition ends the loop for an inconsistent trace
    while 0 <= draft.parents[node] < node:
        node, depth = draft.parents[node], depth + 1
    return depth


def _mean(values: list[float]) -> float | None:
    return _ratio(sum(values), len(values))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
