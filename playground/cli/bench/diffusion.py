"""`bench diffusion`: decoders of masked canvases on the bundled denoiser, task by task."""
from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING

from playground.bench.report_text import report_json
from playground.cli.bench.survey import check_some, gather
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import load
from playground.cli.remaining_time import counted
from playground.cli.shared_options import CommandParser, add_count, add_model, add_results, add_threads
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.bench.canvas_filling import Filled

FIGURES = "diffusion.json"
PAGE = "docs/diffusion.md"


def measure_options(command: CommandParser) -> None:
    add_model(command)
    add_threads(command)
    add_count(command, "questions", 1, 8, "of each task")
    add_count(command, "seed", 0, 11)
    command.set_defaults(model="pocket-diffusion", draft=None, draft_device="")
    add_results(command, FIGURES, PAGE, "write the tables as a page")


def measure(options: Namespace) -> bool:
    """Answer the questions, print the page, and write the requested files. After Ctrl-C, only what every decoder has
    answered counts.

    Raises Refusal for a model that does not fill masks.
    """
    check_place(options.out)
    check_place(options.page)
    models = load(options, draft=False)
    if not models.target.fills:
        raise Refusal(f"{models.target.name} continues text: choose a denoiser such as pocket-diffusion.", "model")
    import playground
    from playground.bench.canvas_filling import ROWS, answers, complete, document, page, runnable
    from playground.bench.speed.speed_report import machine
    from playground.bench.survey.survey_export import model_facts
    beside = playground.load("pocket", draft=playground.NO_DRAFT, dtype=options.dtype)
    found: list[Filled] = []
    decoders = len(runnable(models)) + 1
    total = options.questions * len(ROWS) * decoders
    given = answers(models, beside, options.questions, options.seed)
    stopped = gather(found, counted(given, total, lambda one: f"{one.task}, {one.lane}"))
    check_some(found := complete(found, decoders))
    settings = {**model_facts(models), "questions per task": options.questions, "seed": options.seed}
    settings |= {"stopped": f"with Ctrl-C after {len(found)} of {total} answers"} if stopped else {}
    settings["load average"] = f"{os.getloadavg()[0]:.1f}"
    facts = {"settings": settings, "machine": machine(models.target.device)}
    text = page(found, facts)
    print(text)
    write_text(options.out, report_json(document(found, facts)))
    write_text(options.page, text)
    return stopped
