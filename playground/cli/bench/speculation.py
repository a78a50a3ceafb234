"""`bench speculation`: every lossless speculative strategy compared with plain decoding and with the library."""
from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from playground.bench.report_text import failure_lines, report_json, stored
from playground.bench.speculation.speed_summary import summary
from playground.bench.survey.results import STOPPED, answered_by_all
from playground.bench.survey.survey import Answer, Progress
from playground.cli.bench.speed import load_pair, prepare_machine
from playground.cli.bench.survey import check_some, gather, timed
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import show_progress
from playground.cli.shared_options import (
    HELD_OUT,
    CommandParser,
    add_count,
    add_models,
    add_names,
    add_results,
    add_threads,
)
from playground.cli.terminal_view import table
from playground.contract import discover, make
from playground.questions.questions import Question, ask
from playground.questions.world import TASKS

if TYPE_CHECKING:
    from playground.bench.speed.baselines import TwinModels

FIGURES = "docs/guessing.json"
PAGE = "docs/guessing.md"
SUMMARY = "assets/speculation.json"


def measure_options(command: CommandParser) -> None:
    add_names(command, "only", "some of the drafters and presets; default: all")
    add_names(command, "tasks", "of the small world: records, programs, ...; default: all", "TASK")
    add_count(command, "questions", 1, 3, HELD_OUT)
    add_count(command, "repeats", 1, 3, "measured rounds, after a warm-up that is dropped")
    add_count(command, "seed", 0, 1)
    add_count(command, "max-new-tokens", 2, 330)
    add_models(command)
    command.set_defaults(shapes=[])
    add_threads(command)
    add_results(command, FIGURES, PAGE, "write the tables as a page")
    command.add_argument("--summary", nargs="?", const=SUMMARY, metavar="F.json",
                         help=f"write a line for each strategy, as the library page shows it, {SUMMARY}")


def measure(options: Namespace) -> bool:
    """Measure, print the tables, and write the requested files. After Ctrl-C, questions that every lane has answered
    are shown and written, without the library's comparison and the summary.
    """
    questions = _questions(options)
    for path in (options.out, options.page, options.summary):
        check_place(path)
    prepare_machine(options)
    from playground.bench.speculation import speculation_report as report  # late, since these import torch
    from playground.bench.speculation import speculative_lanes as lanes
    lanes.entrants(True, options.only)  # raises Refusal for an unknown name before anything is loaded
    target, draft = load_pair(options)
    show_progress(1.0, "")
    entrants = lanes.entrants(draft is not None, options.only, _fitted(target))
    pairs = lanes.pairs(entrants)
    answers, stopped = _answers(options, (target, draft), questions, entrants, pairs)
    if stopped:
        check_some(answers := answered_by_all(answers, len(entrants) + len(pairs)))
        pairs = []
    print("\n\n".join(f"{title}\n{table(rows)}" for title, _, rows in report.sections(answers, pairs)))
    for line in failure_lines((answer.entrant, answer.failure) for answer in answers):
        print(line)
    facts = _facts(options, target, draft)
    if stopped:
        facts["settings"]["stopped"] = STOPPED.format(len({(answer.number, answer.round) for answer in answers}))
    document = stored(report.document(facts, answers, pairs))
    write_text(options.out, report_json(document))
    write_text(options.page, report.page(document))
    if not stopped:
        write_text(options.summary, json.dumps(summary(document), indent=1))
    return stopped


def _fitted(target: TwinModels) -> list[str]:
    """The strategies that need trained weights and have some for the target."""
    from playground.decoding.fitted_weights import is_fitted
    trained = [make(name) for name, cls in discover().items() if "trained" in cls.needs and cls.fitted_to_target]
    return [strategy.name for strategy in trained if is_fitted(strategy, {"target": target.model})]


def _questions(options: Namespace) -> list[Question]:
    """The same number of every task; raises Refusal."""
    return [
        question
        for task in dict.fromkeys(options.tasks or TASKS)
        for question in ask(task, options.questions, options.seed)
    ]


def _answers(
    options: Namespace,
    models: tuple[TwinModels, TwinModels | None],
    questions: list[Question],
    entrants: list[Any],
    pairs: list[Any],
) -> tuple[list[Answer], bool]:
    """All answers, and whether Ctrl-C stopped the measurement."""
    from playground.bench.speculation.library_baselines import Library
    from playground.bench.speculation.observe import LibraryExaminer, observe
    from playground.decoding.limits import Limits
    from playground.decoding.models import Models
    target, draft = models
    library = {pair.theirs: Library.of(pair, target, draft, options.max_new_tokens) for pair in pairs}
    limits = Limits(options.seed, options.max_new_tokens)
    pair = Models(target.model, draft and draft.model)
    examiner = LibraryExaminer(pair, limits, lambda question, text: None, library)  # all write the same: not scored
    answers: list[Answer] = []
    everyone = examiner.entrants(entrants)
    progress = Progress(everyone, questions, options.repeats)
    return answers, gather(answers, timed(observe(examiner, everyone, questions, options.repeats), progress))


def _facts(options: Namespace, target: TwinModels, draft: TwinModels | None) -> dict[str, Any]:
    from playground.bench.speed.speed_report import machine
    from playground.bench.survey.survey_export import model_facts
    from playground.decoding.models import Models
    names = ("questions", "repeats", "seed", "max_new_tokens")
    models = model_facts(Models(target.model, draft and draft.model))
    settings = models | {name: getattr(options, name) for name in names}
    return {"settings": settings, "machine": machine(target.model.device)}
