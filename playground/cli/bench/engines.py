"""`bench engines`: llguidance and XGrammar on the same grammars."""
from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from playground.bench.survey.survey_export import model_facts
from playground.cli import terminal_view as screen
from playground.cli.bench.survey import gather
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import load, show_progress
from playground.cli.shared_options import CommandParser, add_count, add_model

if TYPE_CHECKING:
    from playground.bench.engines.engine_trial import EngineComparison, EngineTrial
    from playground.bench.engines.grammar_sources import GrammarSource

PAGE = "docs/engines.md"


def measure_options(command: CommandParser) -> None:
    command.add_argument("folders", metavar="FOLDER", nargs="*",
                         help="JSON Schemas, besides the grammars of every kind that are compared in any case")
    add_count(command, "scribbles", 1, 4, "random texts per grammar and engine")
    add_count(command, "seed", 0, 0)
    add_model(command)
    command.set_defaults(draft=None, draft_device="")
    command.add_argument("--json", metavar="F.json", help="write everything")
    command.add_argument("--page", nargs="?", const=PAGE, metavar="FILE",
                         help=f"write the tables as a page, {PAGE}")


def measure(options: Namespace) -> bool:
    """Compare the engines on every grammar, print the tables, and write the requested files. After Ctrl-C, partial
    results are shown.
    """
    for path in (options.json, options.page):
        check_place(path)
    models = load(options, draft=False)
    from playground.bench.engines import engines_report as report  # late, since these import torch
    from playground.bench.engines.engine_trial import EngineTrial
    from playground.bench.engines.grammar_sources import grammar_sources
    from playground.bench.engines.xgrammar_engine import XGrammarEngine
    from playground.bench.speed.speed_report import machine
    trial = EngineTrial(models.target, XGrammarEngine(models.target), options.scribbles, options.seed)
    found: list[EngineComparison] = []
    stopped = gather(found, _results(trial, grammar_sources(options.folders)))
    tables = (
        (report.mask_rows(found), 1), (report.time_rows(found), 2), (report.difference_rows(found), 2),
        (report.instance_rows(found), 1), (report.verdict_rows(found), 2),
    )
    for rows, left in tables:
        print(screen.CONTROL.sub("\ufffd", screen.table(rows, left)) + "\n")
    versions = {name: version(name) for name in ("llguidance", "xgrammar")}
    settings = {**model_facts(models), **versions, "scribbles": options.scribbles, "seed": options.seed}
    facts = {"settings": settings, "machine": machine(models.target.device)}
    write_text(options.json, json.dumps(report.document(facts, found), indent=1))
    if options.page and not stopped:
        write_text(options.page, report.page(facts, found))
    return stopped


def _results(trial: EngineTrial, sources: Sequence[GrammarSource]) -> Iterator[EngineComparison]:
    for number, source in enumerate(sources):
        show_progress(number / len(sources), source.name)
        yield trial.compare(source)
    show_progress(1.0, "")
