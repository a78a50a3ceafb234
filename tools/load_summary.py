"""What a load on the page was and did: its requests, what became of each, and every promise that was broken."""
from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from visitor import Server

SEATS = 40  # runs the page serves at once (QueueLimits.whole)
MOST_OF_IDEAL = 2.0  # times the ideal share, at the 95th percentile
GROWTH = 0.05  # of memory after the warm-up
WARM_UP = 0.2  # share of the time
SLACK = {"threads": 8, "handles": 8, "children": 1}  # beyond what there was before the load
IDLE = 30.0  # percent of a core, at most, when everybody has left


@dataclass
class Request:
    """One kind of request, and what it took alone: seconds to the first token (None where there is none) and to the
    end.
    """

    lanes: list[dict[str, Any]]
    prompt: str
    context: str
    length: int
    first: float | None = None
    work: float = 0.0


@dataclass
class Outcome:
    """What became of one request; times are in seconds from the moment it was sent."""

    end: str  # done, left, refused or broken
    habit: str
    first: float | None = None
    ideal: float | None = None
    seconds: float = 0.0
    said: str = ""
    function: str = ""  # page_run, run or compare
    seated: float | None = None


@dataclass
class Load:
    """All that visitors share: what they ask for, who is running, and what became of their requests."""

    server: Server
    requests: list[Request]
    think: float
    until: float
    running: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    pages: int = 0

    def ideal(self, asked: Request) -> float | None:
        """Seconds to the first token at the ideal share of the machine, with so many others running."""
        if asked.first is None:
            return None
        work = statistics.mean(one.work for one in self.requests)
        return asked.first * (1 + min(self.running, SEATS - 1)) + work * max(0, self.running - SEATS + 1)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; nan where there is none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def growth(samples: list[dict[str, float]]) -> float:
    """Share by which memory grew from the end of the warm-up to the end; medians over a tenth of the samples."""
    warm, window = int(len(samples) * WARM_UP), max(1, len(samples) // 10)
    sizes = [sample["mb"] for sample in samples]
    return statistics.median(sizes[-window:]) / statistics.median(sizes[warm:warm + window]) - 1 if sizes else 0.0


def summary(load: Load, before: dict[str, float], after: dict[str, float], busy: float) -> dict[str, Any]:
    timed = [one for one in load.outcomes if one.first is not None and one.ideal is not None]
    first, ideal = [one.first for one in timed], [one.ideal for one in timed]
    ratios = [one.first / one.ideal for one in timed]
    found = {
        "pages": load.pages,
        "requests": len(load.outcomes),
        "ends": dict(Counter(one.end for one in load.outcomes)),
        "habits": dict(Counter(one.habit for one in load.outcomes)),
        "first_p50": percentile(first, 0.5),
        "first_p95": percentile(first, 0.95),
        "ideal_p50": percentile(ideal, 0.5),
        "ideal_p95": percentile(ideal, 0.95),
        "ratio_p50": percentile(ratios, 0.5),
        "ratio_p95": percentile(ratios, 0.95),
        "growth": growth(load.samples),
        "before": before,
        "after": after,
        "busy_percent": busy,
        "most_running": max((sample["running"] for sample in load.samples), default=0),
        "tracebacks": load.server.tracebacks,
        "refusals": dict(Counter(one.said[:120] for one in load.outcomes if one.end == "refused").most_common(8)),
    }
    return {**found, "violations": violations(load, found)}


def violations(load: Load, found: dict[str, Any]) -> list[str]:
    """Every promise that was broken, as sentences; an answer that broke one is named once for each text."""
    broken = Counter(one.said for one in load.outcomes if one.end == "broken")
    wrong = [f"{count} answers were broken: {said}" for said, count in broken.most_common(10)]
    left = {name: found["after"].get(name, 0) - found["before"][name] for name in SLACK}
    wrong += [f"{count:.0f} {name} were left over" for name, count in left.items() if count > SLACK[name]]
    served, asked = found["ends"].get("done", 0) + found["ends"].get("left", 0), found["requests"]
    checks = [
        (not load.server.alive, "the server ended"),
        (found["tracebacks"] > 0, f"the log has {found['tracebacks']} tracebacks"),
        (found["growth"] > GROWTH, f"memory grew by {found['growth']:.1%}"),
        (
            found["first_p95"] > MOST_OF_IDEAL * found["ideal_p95"],
            f"p95 of the first token is {found['first_p95']:.2f} s, ideal {found['ideal_p95']:.2f} s",
        ),
        (
            found["busy_percent"] > IDLE,
            f"the server is busy ({found['busy_percent']:.0f} % of a core) with nobody there",
        ),
        (served < asked / 2, f"only {served} of {asked} requests were served"),
    ]
    return wrong + [said for holds, said in checks if holds]


def summary_text(found: dict[str, Any]) -> str:
    ends = ", ".join(f"{count} {end}" for end, count in sorted(found["ends"].items()))
    return "\n".join(
        [
            (
                f"{found['pages']} pages opened, {found['requests']} requests: {ends}; at most {found['most_running']}"
                " at once"
            ),
            (
                f"first token: p50 {found['first_p50']:.2f} s, p95 {found['first_p95']:.2f} s; ideal p50"
                f" {found['ideal_p50']:.2f} s, p95 {found['ideal_p95']:.2f} s; ratio p50 {found['ratio_p50']:.2f}, p95"
                f" {found['ratio_p95']:.2f}"
            ),
            (
                f"memory {found['growth']:+.1%} after the warm-up; before {found['before']}, after {found['after']};"
                f" busy {found['busy_percent']:.0f} %"
            ),
            *(f"refused {count} times: {said}" for said, count in found["refusals"].items()),
            *(f"VIOLATION: {said}" for said in found["violations"]),
        ]
    )
