"""`bench compute`: score against the share of FLOPs and of time, for every compute policy."""
from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from playground.bench.compute.compute_lanes import entrants
from playground.bench.questions import Question, ask
from playground.bench.report_text import failure_lines
from playground.bench.survey import Answer, Progress, survey
from playground.cli.bench_survey import gather, load_for, timed
from playground.cli.input_files import check_place, write_text
from playground.cli.terminal_view import table as screen_table
from playground.pocket.world import TASKS


def measure(options: Namespace) -> bool:
    """Measure, print the overview, and write the requested files. After Ctrl-C nothing is written."""
    lanes, questions = entrants(options.only), _questions(options)
    for path in (options.out, options.page):
        check_place(path)
    models = load_for(lanes, options)
    from playground.bench.compute import compute_report as report  # late, since these import torch
    from playground.bench.speed_report import machine
    from playground.bench.survey_export import model_facts
    from playground.decoding.session import Limits
    answers: list[Answer] = []
    given = survey(models, lanes, questions, options.repeats, Limits(options.seed, options.max_new_tokens))
    if gather(answers, timed(given, Progress(lanes, questions, options.repeats))):
        return True
    rows = report.table(answers, models)
    print(screen_table(report.overview(rows)))
    for line in failure_lines((answer.entrant, answer.failure) for answer in answers):
        print(line)
    names = ("questions", "repeats", "seed", "max_new_tokens")
    settings = model_facts(models) | {name: getattr(options, name) for name in names}
    facts = {"settings": settings, "machine": machine(models.target.device)}
    write_text(options.out, json.dumps(report.document(facts, rows), indent=1))
    if options.page is not None:
        picture = Path(options.page).with_suffix(".svg")
        write_text(str(picture), report.chart(rows).svg())
        write_text(options.page, report.page(facts, rows, picture.name))
    return False


def _questions(options: Namespace) -> list[Question]:
    """The same number of every task, interleaved."""
    drawn = [ask(task, options.questions, options.seed) for task in dict.fromkeys(options.tasks or TASKS)]
    return [question for row in zip(*drawn) for question in row]
