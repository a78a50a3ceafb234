"""Soak: random runs over all strategies and toggles, one after another through the worker that serves the page.

    python tools/soak.py [--runs 500] [--distinct N] [--seed 0] [--out soak.json]

Every strategy comes up as main decoder at least once where there are enough runs; canvas decoders run over the oracle.
A run is read to its end as a browser reads it. `--distinct` repeats so many different runs, for a short soak in which
nothing is new after the warm-up. Exit code 1 if memory grows by more than 5 % after the warm-up (the first two
fifths of the runs), where a thread, a handle or a child process is left, where a run never ends, or where a lane fails
with anything but a sentence. Memory is the resident set of the process after a garbage collection and `malloc_trim`,
median over a window of runs.
"""
from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the file is run as a script

from random_requests import CONTEXT, PROMPTS, random_lane  # noqa: E402

from playground.contract import discover  # noqa: E402
from playground.contract.metadata import facts  # noqa: E402
from playground.decoding.visitor_memory import Memory  # noqa: E402
from playground.engine.checkpoint.catalogue import ORACLE  # noqa: E402
from playground.errors import Refusal  # noqa: E402
from playground.ui.components.settings import Settings  # noqa: E402
from playground.ui.server.site import Site  # noqa: E402
from playground.ui.server.worker import Run  # noqa: E402

GROWTH = 0.05  # of memory after the warm-up
WARM_UP = 0.4  # share of all runs
SLACK = {"threads": 1, "handles": 2, "children": 0}  # allowed growth after the warm-up
LONGEST = 60.0  # seconds after which a run is stopped
LONGEST_STOP = 10.0  # further seconds until it must have ended
UNEXPECTED = "unexpected error ("


@dataclass
class Report:
    """Results of the runs; megabytes are of the resident set."""

    runs: int = 0
    ends: Counter = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    def growth(self) -> float:
        """Share by which memory grew from the runs after the warm-up to the last ones."""
        warm = int(len(self.megabytes) * WARM_UP)
        window = max(1, (len(self.megabytes) - warm) // 8)
        first, last = statistics.median(self.megabytes[warm:warm + window]), statistics.median(self.megabytes[-window:])
        return last / first - 1

    def violations(self) -> list[str]:
        left = [
            f"{self.after[name] - self.before[name]} more {name} than after the warm-up"
            for name, slack in SLACK.items()
            if self.after[name] - self.before[name] > slack
        ]
        grown = [f"memory grew by {self.growth():.1%}"] if self.growth() > GROWTH else []
        return [*grown, *left, *self.errors]

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "ends": dict(self.ends),
            "growth": self.growth(),
            "megabytes": self.megabytes,
            "before": self.before,
            "after": self.after,
            "slow": self.slow,
            "violations": self.violations(),
        }


def requests(runs: int, seed: int, distinct: int) -> list[Settings]:
    """Settings of all runs; the first `distinct` are repeated."""
    made = list(islice(_random_settings(seed), distinct))
    return list(islice(cycle(made), runs))


def _random_settings(seed: int) -> Iterator[Settings]:
    """Endless random settings; the main decoders are shuffled, so that each occurs."""
    known, chance = [facts(cls) for cls in discover().values()], random.Random(seed)
    mains = [one for one in known if one["kind"] in ("decoder", "preset", "canvas_decoder")]
    for number in count():
        if number % len(mains) == 0:
            chance.shuffle(mains)
        yield _settings(known, chance, mains[number % len(mains)])


def _settings(known: list[dict[str, Any]], chance: random.Random, main: dict[str, Any]) -> Settings:
    lanes = [random_lane(known, chance, main)] + [random_lane(known, chance) for _ in range(chance.choice((0, 0, 1)))]
    if main["kind"] == "canvas_decoder":
        return Settings(
            prompt=chance.choice(PROMPTS),
            length=12,
            seed=chance.randrange(100),
            model=ORACLE,
            draft="none",
            lanes=lanes[:1],
        )
    return Settings(
        prompt=chance.choice(PROMPTS),
        context=chance.choice(("", CONTEXT)),
        mode=chance.choice(("raw", "chat")),
        seed=chance.randrange(100),
        length=chance.randint(4, 24),
        lanes=lanes,
    )


def soak(runs: int, seed: int, distinct: int) -> Report:
    """Carry out all runs; failures of a run are reported, not raised."""
    site, report = Site(), Report()
    for number, settings in enumerate(requests(runs, seed, distinct)):
        _one(site, settings, report)
        report.runs += 1
        report.megabytes.append(resident())
        if number + 1 == max(1, int(runs * WARM_UP)):
            report.before = held()
        if sys.stderr.isatty():
            print(f"\r{number + 1}/{runs} {report.megabytes[-1]:.0f} MB", end="", file=sys.stderr)
    report.after = held()
    return report


def _one(site: Site, settings: Settings, report: Report) -> None:
    name = json.dumps(settings.lanes)[:300]
    try:
        run = site.runs.start(site.chosen.load(settings), settings, Memory())
    except Refusal:
        report.ends["refused"] += 1
        return
    if not _ended(run, name, report):
        report.errors.append(f"never ended: {name}")
    report.ends.update(_ends(run))
    report.errors += [f"{event['message']} in {name}" for event in run.events if UNEXPECTED in event.get("message", "")]
    report.errors += [f"{run.error} in {name}"] if run.error else []


def _ended(run: Run, name: str, report: Report) -> bool:
    """Read the run as a browser does; whether it came to an end, perhaps after it was stopped for being slow."""
    start, stopped = time.monotonic(), 0.0
    for _ in run.frames():
        now = time.monotonic()
        if not stopped and now - start > LONGEST:
            run.stop()
            stopped = now
            report.slow.append(name)
        if stopped and now - stopped > LONGEST_STOP:
            return False
    return True


def _ends(run: Run) -> list[str]:
    """Why each lane ended."""
    return [
        event.get("reason", "end") if event["kind"] == "done" else "failed"
        for event in run.events
        if event["kind"] in ("done", "failed")
    ]


def resident() -> float:
    """Resident memory in MB, after what is free has been given back to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20


def held() -> dict[str, int]:
    """Threads, handles and child processes."""
    own = psutil.Process()
    return {"threads": own.num_threads(), "handles": own.num_fds(), "children": len(own.children(recursive=True))}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--distinct", type=int, default=0, help="different runs among them; all differ if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    given = parser.parse_args(arguments)
    start, report = time.monotonic(), soak(given.runs, given.seed, given.distinct or given.runs)
    if given.out:
        given.out.write_text(json.dumps(report.to_json(), indent=1), encoding="utf-8")
    print(
        f"{report.runs} runs in {time.monotonic() - start:.0f} s: {dict(report.ends)}; memory {report.growth():+.1%}"
        f" after the warm-up (last {report.megabytes[-1]:.0f} MB); held {report.before} -> {report.after};"
        f" {len(report.slow)} stopped after {LONGEST:.0f} s"
    )
    for violation in report.violations():
        print(f"VIOLATION: {violation}")
    return bool(report.violations())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
