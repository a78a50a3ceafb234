"""The load and soak programs: their violations, and a short run of each."""
from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from load_page import CONTROLS
from load_summary import SEATS, Load, Outcome, Request, percentile, summary
from soak import Report
from visitor import ARGUMENTS, Server

from playground.ui.components.settings import Settings
from playground.ui.server.admission_queue import QueueLimits
from playground.ui.server.api import signature

ROOT = Path(__file__).parents[1]
HELD = {"threads": 6, "handles": 9, "children": 0}


def soaked(*megabytes: float, **left: int) -> list[str]:
    return Report(runs=len(megabytes), megabytes=list(megabytes), before=dict(HELD), after=HELD | left).violations()


def test_a_soak_with_growth_or_leaks_is_a_violation():
    assert soaked(*[500.0] * 40) == []
    assert soaked(*[300.0] * 12, *[500.0] * 28) == []  # growth during the warm-up is allowed
    assert soaked(*[500.0 + 2 * run for run in range(40)]) == ["memory grew by 7.9%"]
    assert soaked(*[500.0] * 40, threads=9) == ["3 more threads than after the warm-up"]
    assert soaked(*[500.0] * 40, children=1) == ["1 more children than after the warm-up"]


def loaded(*outcomes: Outcome, megabytes: float = 0.0, busy: float = 0.0, **left: int) -> list[str]:
    server = SimpleNamespace(alive=True, tracebacks=0)
    samples = [{"at": at, "running": 1, "mb": 500 + megabytes * at / 100} for at in range(100)]
    load = Load(server, [], 0, 0, outcomes=list(outcomes), samples=samples)
    return summary(load, dict(HELD), HELD | left, busy)["violations"]


def run(first: float, ideal: float = 1.0, end: str = "done", said: str = "") -> Outcome:
    return Outcome(end, "reads", first, ideal, first, said)


def test_a_load_that_breaks_a_limit_is_a_violation():
    fine = [run(1.9)] * 20
    assert loaded(*fine) == []
    assert loaded(*fine, run(9.0)) == []  # one in twenty may be late
    assert loaded(*fine, run(9.0), run(9.0)) == ["p95 of the first token is 9.00 s, ideal 1.00 s"]
    assert loaded(*fine, run(1.0, end="refused", said="The page is full: try again in a minute.")) == []
    assert loaded(*fine, *[run(1.0, end="refused", said="The page is full.")] * 21) == [
        "only 20 of 41 requests were served"
    ]
    assert loaded(*fine, run(1.0, end="broken", said="HTTP 500")) == ["1 answers were broken: HTTP 500"]
    assert loaded(*fine, megabytes=50) == ["memory grew by 6.8%"]
    assert loaded(*fine, threads=40) == ["34 threads were left over"]
    assert loaded(*fine, busy=90) == ["the server is busy (90 % of a core) with nobody there"]


def test_the_ideal_share_counts_concurrent_and_queued_visitors():
    requests = [Request([], "", "", 8, first=0.1, work=2.0)]
    load = Load(None, requests, 0, 0)
    assert load.ideal(requests[0]) == pytest.approx(0.1)
    load.running = 3
    assert load.ideal(requests[0]) == pytest.approx(0.4)
    load.running = SEATS + 1
    assert load.ideal(requests[0]) == pytest.approx(0.1 * SEATS + 2 * 2.0)
    assert load.ideal(Request([], "", "", 8)) is None


def test_the_load_knows_how_many_runs_the_page_serves_at_once():
    assert QueueLimits().whole.seats == SEATS


def test_the_load_sends_every_control_of_the_page_and_every_argument_of_an_endpoint():
    assert list(CONTROLS) == Settings.names() and {*CONTROLS} <= {*ARGUMENTS}
    assert list(ARGUMENTS) == list(signature().parameters)  # Gradio refuses a request that lacks one


def test_tracebacks_are_counted_beyond_the_lines_that_are_kept():
    server = Server("", None)
    server.note(["Traceback (most recent call last):\n", *['  File "a.py"\n'] * 9] * 100)
    assert server.tracebacks == 100 and len(server.log) < 1000


def test_a_percentile_is_an_observed_value():
    assert (
        percentile([3.0, 1.0, 2.0], 0.5) == 2.0
        and percentile([1.0, 2.0], 0.95) == 2.0
        and math.isnan(percentile([], 0.5))
    )


def carried_out(*command: str) -> None:
    process = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-1500:]


@pytest.mark.long
def test_five_visitors_are_served_for_a_short_while():
    carried_out("tools/load_page.py", "--visitors", "5", "--minutes", "0.33", "--think", "2", "--requests", "8")


@pytest.mark.long
def test_forty_runs_leak_nothing():
    carried_out("tools/soak.py", "--runs", "40", "--distinct", "8")
