"""`bench compute`: score against the share of FLOPs and of time, for every compute policy."""
from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground.bench.compute.compute_lanes import PLAIN, entrants, policy_of
from playground.bench.report_text import failure_lines, report_json
from playground.bench.survey.results import STOPPED, answered_by_all
from playground.bench.survey.survey import Answer, Entrant, Progress, survey
from playground.cli.bench.survey import check_some, gather, load_for, timed
from playground.cli.input_files import check_place, write_text
from playground.cli.shared_options import (
    HELD_OUT,
    CommandParser,
    add_count,
    add_models,
    add_names,
    add_results,
    add_threads,
)
from playground.cli.terminal_view import table as screen_table
from playground.errors import Refusal
from playground.questions.questions import Question, ask
from playground.questions.world import TASKS

if TYPE_CHECKING:
    from playground.bench.compute.compute_report import ComputeRow

FIGURES = "docs/compute.json"
PAGE = "docs/compute.md"
LATER = "measured_later"


def measure_options(command: CommandParser) -> None:
    add_names(command, "only", "some of the compute policies; default: all")
    add_names(command, "tasks", "of the small world: records, arithmetic, ...; default: all", "TASK")
    add_count(command, "questions", 1, 12, HELD_OUT)
    add_count(command, "repeats", 1, 1, "measured rounds, after a warm-up that is dropped")
    add_count(command, "seed", 0, 1)
    add_count(command, "max-new-tokens", 2, 160)
    command.add_argument("--add", metavar="F.json",
                         help="results written by --out with the same settings; policies measured again replace theirs")
    add_models(command)
    add_threads(command)
    add_results(command, FIGURES, PAGE, "write the tables as a page, and a chart next to it")


def measure(options: Namespace) -> bool:
    """Measure, print the overview, and write the requested files. After Ctrl-C, questions that every lane has answered
    are shown and written.
    """
    lanes, questions = entrants(options.only), _questions(options)
    for path in (options.out, options.page):
        check_place(path)
    before = _earlier(options.add)
    models = load_for(lanes, options)
    from playground.bench.compute import compute_report as report  # late, since these import torch
    from playground.bench.speed.speed_report import machine
    from playground.bench.survey.survey_export import model_facts
    from playground.decoding.limits import Limits
    answers: list[Answer] = []
    given = survey(models, lanes, questions, options.repeats, Limits(options.seed, options.max_new_tokens))
    stopped = gather(answers, timed(given, Progress(lanes, questions, options.repeats)))
    if stopped:
        check_some(answers := answered_by_all(answers, len(lanes)))
    names = ("questions", "repeats", "seed", "max_new_tokens")
    settings = model_facts(models) | {name: getattr(options, name) for name in names}
    rows = _joined(before, settings, report.table(answers, models))
    print(screen_table(report.overview(rows)))
    for line in failure_lines((answer.entrant, answer.failure) for answer in answers):
        print(line)
    now = machine(models.target.device)
    if before:  # their times are shares of a plain lane of the same run, so they can be compared
        settings |= _measured_later(before["settings"], lanes, now)
        now = before["machine"]
    settings |= {"stopped": STOPPED.format(len(answers) // len(lanes))} if stopped else {}
    facts = {"settings": settings, "machine": now}
    write_text(options.out, report_json(report.document(facts, rows)))
    if options.page is not None:
        picture = Path(options.page).with_suffix(".svg")
        write_text(str(picture), report.chart(rows).svg())
        write_text(options.page, report.page(facts, rows, picture.name))
    return stopped


def _earlier(path: str | None) -> dict[str, Any]:
    """What an earlier run wrote; nothing without a path. Raises Refusal."""
    if path is None:
        return {}
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        return {name: found[name] for name in ("settings", "machine", "rows")}
    except (OSError, ValueError, KeyError, TypeError):
        raise Refusal(f"{path} contains no results of this benchmark: give a file written by --out.", "add") from None


def _measured_later(settings: dict[str, Any], lanes: list[Entrant], now: dict[str, Any]) -> dict[str, str]:
    """What was added to the results of an earlier run, and where, after what was added to it before."""
    policies = ", ".join(dict.fromkeys(policy_of(lane.name) for lane in lanes[1:]))
    added = f"{policies} on {now['processor']}, load average over 15 minutes {os.getloadavg()[2]:.0f}"
    return {LATER: "; ".join(filter(None, (settings.get(LATER), added)))}


def _joined(before: dict[str, Any], settings: dict[str, Any], rows: list[ComputeRow]) -> list[ComputeRow]:
    """Earlier rows of other policies, and these. Raises Refusal if they were measured with other settings."""
    if not before:
        return rows
    from playground.bench.compute.compute_report import read_row
    other = [name for name, value in settings.items() if before["settings"].get(name) != value]
    if other:
        raise Refusal(f"The earlier results were measured with another {other[0]}: measure all policies again.", "add")
    measured = {policy_of(row.lane) for row in rows} - {PLAIN}
    kept = [row for row in map(read_row, before["rows"]) if policy_of(row.lane) not in measured]
    return [*kept, *(row for row in rows if row.lane != PLAIN)]


def _questions(options: Namespace) -> list[Question]:
    """The same number of every task, interleaved."""
    drawn = [ask(task, options.questions, options.seed) for task in dict.fromkeys(options.tasks or TASKS)]
    return [question for row in zip(*drawn) for question in row]
