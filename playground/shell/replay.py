"""`replay`: a recorded run once more, at its own pace. Imports neither torch nor gradio."""
from __future__ import annotations

import math
import time
from argparse import Namespace

from playground.errors import Refusal
from playground.result import Result
from playground.shell.screen import Screen, report
from playground.trace import Trace, check, replay


def play(options: Namespace) -> bool:
    """Print a trace as its run was printed; raises Refusal where the file cannot be read or contradicts itself."""
    trace = Trace.load(options.file)
    if not trace.headers:
        raise Refusal(f"{options.file} holds no lane: there is nothing to show.")
    _show(trace, options.speed or math.inf)
    if complaints := check(trace):
        raise Refusal(f"{options.file} contradicts itself, so it says nothing about costs: {complaints[0]}.")
    results = [Result(trace.lane(header.lane)) for header in trace.headers]
    print(f"\n{report(results)}")
    return False


def _show(trace: Trace, speed: float) -> None:
    screen = Screen(trace.headers)
    for wait, stamped in replay(trace, speed):
        if wait > 0:
            time.sleep(wait)
        screen.show(stamped)
