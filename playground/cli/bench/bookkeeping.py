"""`bench bookkeeping`: the overhead of strategies outside forwards."""
from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.bench.bookkeeping.bookkeeping_defaults import QUICK, Sizes
from playground.bench.report_text import report_json
from playground.cli import terminal_view as screen
from playground.cli.bench.survey import gather
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import set_up, show_progress
from playground.cli.remaining_time import RemainingTime
from playground.cli.shared_options import CommandParser, add_count, add_names, add_results
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.bench.bookkeeping.bookkeeping_trial import Bookkeeping

FIGURES = "docs/bookkeeping.json"
PAGE = "docs/bookkeeping.md"
LOAD = "load average over 15 minutes"


def measure_options(command: CommandParser) -> None:
    add_names(command, "only", "some of the strategies; default: all that generate text")
    command.add_argument("--quick", action="store_true", help="a small vocabulary and a short prompt")
    for name, low, meaning in (
        ("vocabulary", 2000, "tokens of the model"),
        ("layers", 1, "of the KV cache"),
        ("context", 600, "tokens of the prompt"),
        ("watched", 300, "tokens of the prompt where the attention weights or logits of all of it are read"),
        ("tokens", 2, "generated"),
        ("seconds", 1, "after which a strategy is stopped"),
    ):
        add_count(command, name, low, None, meaning)
    command.add_argument("--add", metavar="F.json", help="add the results to those of an earlier run, written by --out")
    command.add_argument("--verbose", action="store_true", help="show the output of the libraries")
    command.set_defaults(threads=None)
    add_results(command, FIGURES, PAGE, "write the tables as a page")


def measure(options: Namespace) -> bool:
    """Measure the strategies, print the table, and write the requested files. After Ctrl-C, partial results are shown
    and written.

    Raises Refusal for a name that cannot be measured, before anything is measured.
    """
    for path in (options.out, options.page):
        check_place(path)
    set_up(options)
    import torch

    from playground.bench.bookkeeping.bookkeeping_report import table, verdict  # late: torch
    sizes, names = _sizes(options), _names(options.only)
    torch.set_num_threads(1)  # so that all work is done in the lane's thread
    earlier = [result for result in _earlier(options.add) if result.strategy not in names]
    stopped = gather(measured := [], _written(options, sizes, earlier, names))
    results = [*earlier, *measured]
    print(screen.table(table(results)) + "\n\n" + verdict(results))
    return stopped


def _written(
    options: Namespace, sizes: Sizes, results: list[Bookkeeping], names: list[str]
) -> Iterator[Bookkeeping]:
    """Results as they are measured. The requested files are written with each, because a run takes many minutes."""
    for measured in _results(sizes, names):
        results = [*results, measured]
        _write(options, sizes, results)
        yield measured


def _write(options: Namespace, sizes: Sizes, results: list[Bookkeeping]) -> None:
    import torch

    from playground.bench.bookkeeping.bookkeeping_report import document, page
    from playground.bench.bookkeeping.strategy_lanes import measured_names
    from playground.bench.speed.speed_report import machine
    missing = len(set(measured_names()) - {result.strategy for result in results})
    # other work slows caches and memory down, and so the CPU time that a strategy takes
    now = machine(torch.device("cpu")) | {LOAD: round(os.getloadavg()[2], 1)}
    facts = {"settings": asdict(sizes), "machine": _machines(options, now)}
    facts |= {"partial": {"strategies that were not measured": missing}} if missing else {}
    write_text(options.out, report_json(document(facts, results)))
    write_text(options.page, page(facts, results))


def _machines(options: Namespace, now: dict[str, Any]) -> dict[str, Any]:
    """The machine of this run; where results are added, that of the others, with those that this one measured."""
    if options.add is None:
        return now
    others = json.loads(Path(options.add).read_text(encoding="utf-8-sig")).get("machine", {})
    if not options.only or not others:
        return now
    return others | {f"{', '.join(options.only)}: processor, {LOAD}": f"{now['processor']}, {now[LOAD]}"}


def _sizes(options: Namespace) -> Sizes:
    """The requested sizes: the default ones or the quick ones, with the changes."""
    given = {name: value for name in asdict(QUICK) if (value := getattr(options, name)) is not None}
    return replace(QUICK if options.quick else Sizes(), **given)


def _names(only: list[str]) -> list[str]:
    from playground.bench.bookkeeping.strategy_lanes import lane_of, measured_names
    for name in only:
        lane_of(name)
    return list(dict.fromkeys(only)) or measured_names()


def _results(sizes: Sizes, names: list[str]) -> Iterator[Bookkeeping]:
    from playground.bench.bookkeeping.bookkeeping_trial import BookkeepingTrial
    show_progress(0.0, "making the model")
    trial = BookkeepingTrial(sizes)
    progress = RemainingTime()
    for number, name in enumerate(names):
        progress(number / len(names), name)
        yield trial.measure(name)


def _earlier(path: str | None) -> list[Bookkeeping]:
    """The results in a file of an earlier run. Raises Refusal for a file that is not one."""
    from playground.bench.bookkeeping.bookkeeping_trial import Bookkeeping
    if path is None:
        return []
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        return [Bookkeeping(**fields) for fields in found["strategies"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise Refusal(f"{path} contains no results of this benchmark: give a file written by --out.", "add") from None
