"""`replay`: shows a recorded run at its own pace, or exports it for other programs. Imports neither torch nor gradio.
"""
from __future__ import annotations

import math
import sys
import time
from argparse import Namespace

from playground.cli.input_files import check_place, write_text
from playground.cli.shared_options import CommandParser, not_negative
from playground.cli.terminal_view import Screen, report
from playground.errors import Refusal
from playground.player.standalone import to_html
from playground.trace import Trace, check, replay
from playground.trace.csv_export import to_csv
from playground.trace.result import Result

WRITERS = {"csv": to_csv, "html": to_html}


def play_options(command: CommandParser) -> None:
    command.add_argument("file", metavar="F.jsonl", help="a file written by --trace")
    command.add_argument(
        "--speed", type=not_negative, default=1.0, metavar="X", help="2 is twice as fast, 0 all at once"
    )
    command.add_argument("--csv", metavar="FILE", help="write one row per token instead of showing the run")
    command.add_argument("--html", metavar="FILE",
                         help="write a page that plays the run without a server, instead of showing it")


def play(options: Namespace) -> bool:
    """Print a trace as its run was printed, or export it; raises Refusal if the file is unreadable or inconsistent."""
    wanted = {form: path for form in WRITERS if (path := getattr(options, form))}
    for path in wanted.values():
        check_place(path)
    trace = Trace.load(options.file)
    if not trace.headers:
        raise Refusal(f"{options.file} contains no lane: there is nothing to show.")
    for form, path in wanted.items():
        write_text(path, WRITERS[form](trace))
        print(f"wrote {path}", file=sys.stderr)
    if not wanted:
        _print(trace, options)
    return False


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
