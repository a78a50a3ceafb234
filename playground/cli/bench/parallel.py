"""`bench parallel`: decoders of masked canvases on list tasks, over the exact table of the answers."""
from __future__ import annotations

from argparse import Namespace

from playground.bench.report_text import report_json
from playground.cli.bench.survey import check_some, gather
from playground.cli.input_files import check_place, write_text
from playground.cli.remaining_time import counted
from playground.cli.shared_options import CommandParser, add_count, add_results, add_threads

FIGURES = "parallel.json"
PAGE = "docs/parallel.md"


def measure_options(command: CommandParser) -> None:
    add_threads(command)
    add_count(command, "questions", 1, 100, "of each task")
    add_count(command, "seed", 0, 0)
    command.set_defaults(verbose=False)
    add_results(command, FIGURES, PAGE, "write the tables as a page")


def measure(options: Namespace) -> bool:
    """Answer the questions, print the page, and write the requested files. After Ctrl-C, only whole tasks count."""
    check_place(options.out)
    check_place(options.page)
    import torch

    from playground.bench.parallel_limits import LENGTH, TASKS, ListAnswer, answers, complete, decoders, document, page
    from playground.bench.speed.speed_report import machine
    found: list[ListAnswer] = []
    total = options.questions * len(TASKS) * len(decoders(LENGTH))
    given = answers(options.questions, options.seed)
    stopped = gather(found, counted(given, total, lambda one: f"{one.task}, {one.lane}"))
    check_some(found := complete(found, options.questions))
    settings = {"questions per task": options.questions, "seed": options.seed}
    settings |= {"stopped": f"with Ctrl-C after {len(found)} of {total} answers"} if stopped else {}
    facts = {"settings": settings, "machine": machine(torch.device("cpu"))}
    text = page(found, facts)
    print(text)
    write_text(options.out, report_json(document(found, facts)))
    write_text(options.page, text)
    return stopped
