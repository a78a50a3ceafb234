"""One lane under many seeds: which texts came of it, and how often.

A trace whose lanes differ in nothing but their seed is read as a sample of what the lane may write. Runs that were
stopped or failed have written no whole text and are left out. Imports neither torch nor gradio.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from playground.trace import Trace
from playground.trace.lane_metrics import diff
from playground.trace.result import Result
from playground.trace.transcript import sequences

UNFINISHED = ("stopped", "failed")


@dataclass(frozen=True)
class Outcome:
    """One of the texts, with the runs that wrote it."""

    text: str
    seeds: list[int]
    share: float  # of all finished runs
    logprob: float | None  # mean over its tokens, raw, in nats; None where no row was computed
    parts: int | None  # index of the first token in which it differs from the commonest text; None for that one

    @property
    def count(self) -> int:
        return len(self.seeds)


def outcomes(trace: Trace) -> list[Outcome]:
    """The distinct texts of the finished lanes, the commonest first; among equals the one of the lowest seed."""
    written: dict[str, list[Result]] = {}
    for result in _finished(trace):
        written.setdefault(result.text, []).append(result)
    groups = sorted(written.values(), key=lambda group: (-len(group), group[0].header.seed))
    return [_outcome(group, groups) for group in groups]


def _finished(trace: Trace) -> Iterator[Result]:
    lanes = (Result(trace.lane(header.lane)) for header in sorted(trace.headers, key=lambda header: header.seed))
    return (result for result in lanes if result.reason not in UNFINISHED)


def _outcome(group: list[Result], groups: list[list[Result]]) -> Outcome:
    first, commonest = group[0], groups[0][0]
    apart = diff(commonest.trace, first.trace) if first is not commonest else None
    return Outcome(
        first.text,
        [result.header.seed for result in group],
        len(group) / sum(map(len, groups)),
        _mean_logprob(first),
        apart.index if apart else None,
    )


def _mean_logprob(result: Result) -> float | None:
    known = [token.logprob for token in sequences(result.trace.events)[0].tokens if token.logprob is not None]
    return fmean(known) if known else None
