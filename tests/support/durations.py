"""How long each test function takes: this orders the files among workers and bounds what the default run takes.

    python -m pytest --tier full -n 2 --dist loadfile --record-durations

writes the record anew for the functions that ran. Record it on a quiet machine: durations are wall-clock seconds.
"""
from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("durations.json")
DIGITS = 3  # of a second


def function_of(nodeid: str) -> str:
    """The file and the function of a test, without the folder and the parameters."""
    return nodeid.partition("[")[0].rpartition("/")[2]


@cache
def recorded() -> Mapping[str, float]:
    """Mean seconds of a case by test function, set-up included."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


class DurationRecorder:
    """A pytest plugin that adds up the durations of each test function. With xdist it belongs to the controller."""

    def __init__(self, path: Path = RECORD):
        self.path = path
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[function_of(report.nodeid)][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        measured = {name: round(sum(cases.values()) / len(cases), DIGITS) for name, cases in self.seconds.items()}
        before = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        record = dict(sorted({**before, **measured}.items()))
        self.path.write_text(json.dumps(record, indent=0) + "\n", encoding="utf-8")
