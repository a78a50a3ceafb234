"""Lanes that differ in one or two knobs: what each wrote, and how much of it is the text of the first.

Imports neither torch nor gradio.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from playground.events import Reason
from playground.trace import Trace
from playground.trace.lane_metrics import LaneRecord, mean_entropy, tokens_per_second
from playground.trace.result import Result


@dataclass(frozen=True)
class Cell:
    """One finished lane of a grid."""

    text: str
    tokens: int
    reason: Reason
    message: str  # why it failed; empty unless it did
    speed: float | None  # tokens per second, prefill included, on the clock of the lane
    entropy: float | None  # mean over the tokens, before masks and samplers, in nats
    same: float | None  # share of the tokens before the first that differs from the first lane; None without that lane


def cells(trace: Trace) -> dict[int, Cell]:
    """The finished lanes by number. Lane 0 is the one that the others are compared with."""
    results = {header.lane: Result(trace.lane(header.lane)) for header in trace.headers}
    ended = {lane: result for lane, result in results.items() if result.ended}
    first = ended.get(0)
    return {lane: _cell(result, first) for lane, result in ended.items()}


def same_share(a: list[int], b: list[int]) -> float:
    """Leading tokens that two texts share, as a share of the longer one; 1 for two empty texts."""
    longer = max(len(a), len(b))
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    return shared / longer if longer else 1.0


def _cell(result: Result, first: Result | None) -> Cell:
    record = LaneRecord(result.trace.events)
    failed = result.reason == "failed"
    return Cell(
        result.text,
        len(result.token_ids),
        result.reason,
        result.message,
        None if failed else tokens_per_second(record),
        None if failed else mean_entropy(record),
        None if failed or not first or first.reason == "failed" else same_share(first.token_ids, result.token_ids),
    )
