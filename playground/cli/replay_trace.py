"""`replay`: shows a recorded run at its own pace, or exports it for other programs. Imports neither torch nor gradio.
"""
from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from pathlib import Path

from playground.cli.terminal_view import Screen, report
from playground.errors import Refusal
from playground.trace import Trace, check, replay
from playground.trace.csv_export import to_csv
from playground.trace.result import Result
from playground.ui.standalone import to_html

WRITERS = {"csv": to_csv, "html": to_html}


def play(options: Namespace) -> bool:
    """Print a trace as its run was printed, or export it; raises Refusal if the file is unreadable or inconsistent."""
    trace = Trace.load(options.file)
    if not trace.headers:
        raise Refusal(f"{options.file} contains no lane: there is nothing to show.")
    wanted = {form: path for form in WRITERS if (path := getattr(options, form))}
    for form, path in wanted.items():
        _save(path, WRITERS[form](trace))
    if not wanted:
        _print(trace, options)
    return False


def _save(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8", newline="")  # keep line endings as they are
    except OSError as reason:
        raise Refusal(
            f"{path} cannot be written ({reason.strerror or reason}): name a file in a folder that exists.", "file"
        ) from None
    print(f"wrote {path}", file=sys.stderr)


def _print(trace: Trace, options: Namespace) -> None:
    _show(trace, options.speed or math.inf)
    if complaints := check(trace):
        raise Refusal(f"{options.file} is inconsistent, so costs cannot be computed: {complaints[0]}.")
    results = [Result(trace.lane(header.lane)) for header in trace.headers]
    print(f"\n{report(results)}")


def _show(trace: Trace, speed: float) -> None:
    screen = Screen(trace.headers)
    for wait, stamped in replay(trace, speed):
        if wait > 0:
            time.sleep(wait)
        screen.show(stamped)
