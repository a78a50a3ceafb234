"""One lane under many seeds: the distinct texts and how often each occurs.

The lanes of the trace differ only in their seed and are treated as samples. Runs that were stopped or failed have no
complete text and are excluded. Imports neither torch nor gradio.
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
    """One distinct text and the runs that produced it."""

    text: str
    seeds: list[int]
    share: float  # fraction of the finished runs
    logprob: float | None  # mean over its tokens, before masks and samplers, in nats; None if not recorded
    parts: int | None  # index of the first token that differs from the most common text; None for that text

    @property
    def count(self) -> int:
        return len(self.seeds)


def outcomes(trace: Trace) -> list[Outcome]:
    """The distinct texts of the finished lanes, the most common first; ties go to the lowest seed."""
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
