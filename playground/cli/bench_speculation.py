"""`bench guessing`: every lossless way to guess ahead beside plain decoding and the library's own."""
from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from playground.bench.questions import Question, ask
from playground.bench.survey import Answer, Progress
from playground.cli.bench_speed import load_pair, set_up
from playground.cli.bench_survey import gather, timed
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import tell
from playground.cli.terminal_view import table
from playground.pocket.world import TASKS

if TYPE_CHECKING:
    from playground.bench.baselines import TwinModels


def measure(options: Namespace) -> bool:
    """Measure, print the tables, and write what was asked for; what Ctrl-C ends is shown as far as it came, and not
    written.
    """
    questions = _questions(options)
    for path in (options.out, options.page):
        check_place(path)
    set_up(options)
    from playground.bench.speculation import speculation_report as report  # not before: they bring torch along
    from playground.bench.speculation import speculative_lanes as lanes  # not before: they bring torch along
    lanes.entrants(True, options.only)  # refuses a name before anything is loaded
    target, draft = load_pair(options)
    tell(1.0, "")
    entrants = lanes.entrants(draft is not None, options.only)
    pairs = lanes.pairs(entrants)
    answers, stopped = _answers(options, (target, draft), questions, entrants, pairs)
    print(
        "\n\n".join(f"{title}\n{table(rows)}" for title, _, rows in report.sections(answers, [] if stopped else pairs))
    )
    for failure in dict.fromkeys(f"{answer.entrant}: {answer.failure}" for answer in answers if answer.failure):
        print(failure)
    if not stopped:
        facts = _facts(options, target, draft)
        write_text(options.out, json.dumps(report.document(facts, answers, pairs), indent=1))
        write_text(options.page, report.page(facts, answers, pairs))
    return stopped


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
    """Everything that comes, and whether Ctrl-C ended it."""
    from playground.bench.speculation.library_baselines import Library
    from playground.bench.speculation.observe import Beside, observe
    from playground.decoding.session import Limits, Models
    target, draft = models
    library = {pair.theirs: Library.of(pair, target, draft, options.max_new_tokens) for pair in pairs}
    limits = Limits(options.seed, options.max_new_tokens)
    # all write the same: nothing to judge
    examiner = Beside(Models(target.model, draft and draft.model), limits, lambda question, text: None, library)
    answers: list[Answer] = []
    everyone = examiner.everyone(entrants)
    stopped = gather(
        answers,
        timed(observe(examiner, everyone, questions, options.repeats), Progress(everyone, questions, options.repeats)),
    )
    return answers, stopped


def _facts(options: Namespace, target: TwinModels, draft: TwinModels | None) -> dict[str, Any]:
    from playground.bench.speed_report import machine
    from playground.bench.survey_export import models_told
    from playground.decoding.session import Models
    told = models_told(Models(target.model, draft and draft.model))
    own = {
        "questions": options.questions,
        "repeats": options.repeats,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
    }
    return {"settings": told | own, "machine": machine(target.model.device)}
