"""`bench` and `bench speed`: speed compared with the transformers library and with the machine's limits."""
from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from playground import NO_DRAFT
from playground.bench.report_text import report_json
from playground.bench.speed.speed_defaults import PARTS, SHAPES, Grid
from playground.bench.speed.speed_prompts import DEFAULT, Task, read_tasks
from playground.cli.bench.survey import gather
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import set_up, show_progress
from playground.cli.remaining_time import RemainingTime, announce, duration
from playground.cli.shared_options import CommandParser, add_count, add_models, add_out, add_threads, at_least
from playground.cli.terminal_view import table

if TYPE_CHECKING:
    from playground.bench.measurements import Measurement
    from playground.bench.speed.baselines import TwinModels
    from playground.bench.speed.speed_report import Document
    from playground.bench.speed.timing import TimedText

FIGURES = "benchmark.json"
PAGE = "docs/benchmark.md"

SECONDS_PER_TOKEN = 0.1  # of a prompt's text, by all baselines together, with the bundled pair on two CPU cores


def text_options(command: CommandParser) -> None:
    add_models(command)
    add_threads(command)
    add_count(command, "repeats", 1, 5, "measured rounds, after one that is dropped")
    add_count(command, "max-new-tokens", 2, 64)
    command.add_argument("--prompts", metavar="FILE",
                         help='a JSON array of {"task": ..., "prompt": ..., "chat": true or false}')
    add_out(command, FIGURES, "--json")
    command.add_argument("--page", nargs="?", const=PAGE, metavar="F.md", help=f"write the tables as a page, {PAGE}")


def measure_options(command: CommandParser) -> None:
    text_options(command)
    command.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                         help=f"some of {', '.join(PARTS)}; default: all")
    command.add_argument("--shapes", nargs="+", choices=SHAPES, default=[], metavar="S",
                         help=f"further models with random weights and the shapes of public ones: {', '.join(SHAPES)}")
    for name, meaning in (
        ("contexts", "preceding tokens"), ("blocks", "tree nodes per forward"), ("lanes", "lanes at a time")
    ):
        command.add_argument(
            f"--{name}", nargs="+", type=at_least(1), default=list(getattr(Grid(), name)), metavar="N", help=meaning
        )
    command.add_argument("--no-compile", dest="compiled", action="store_false",
                         help="leave out the library's compiled generate, which takes minutes to compile on a CPU")
    command.add_argument("--beside", nargs="+", default=[], metavar="F.json",
                         help="show measurements of other machines on the page, written by --out there")


def measure(options: Namespace) -> bool:
    """Measure, print the tables, and write the requested files. After Ctrl-C, what was measured until then is shown and
    written.
    """
    tasks = read_tasks(options.prompts or DEFAULT)
    for path in (options.out, options.page):
        check_place(path)
    if "text" in options.only:
        announce(plan(len(tasks), options))
    prepare_machine(options)
    from playground.bench.speed import speed_report as report  # late, since these import torch
    from playground.bench.speed.text_baselines import DRAFT_DEPTH, LOOKUP_DEPTH
    beside = [report.read_document(path) for path in options.beside]
    stopped = gather(documents := [], _written(_documents(tasks, options), options.out))
    document = documents[-1]
    print(report.terminal(document, table))
    notes = report.TEXT_NOTES.format(draft_depth=DRAFT_DEPTH, lookup_depth=LOOKUP_DEPTH)
    write_text(options.page, report.page([document, *beside], notes))
    return stopped


def _written(documents: Iterator[Document], path: str | None) -> Iterator[Document]:
    """The documents, each written with what was measured until then, so that a killed run keeps it."""
    for document in documents:
        write_text(path, report_json(document))
        yield document


def plan(prompts: int, options: Namespace) -> str:
    """What the first part measures and about how long that takes, before anything is loaded."""
    rounds = options.repeats + 1
    seconds = SECONDS_PER_TOKEN * prompts * rounds * options.max_new_tokens
    return (
        f"Decodes {prompts} prompts of {options.max_new_tokens} tokens with plain, drafted and library decoding, "
        f"{rounds} times each, the first as a warm-up: about {duration(seconds)} with the bundled pair on two CPU "
        "cores. Fewer --repeats or --max-new-tokens take less; Ctrl-C stops."
    )


def prepare_machine(options: Namespace) -> None:
    """Set up torch and the libraries; raises Refusal for shapes too large for this machine, before any loading."""
    from playground.bench.speed.model_shapes import check
    set_up(options)
    for name in options.shapes:
        check(name, _loading(options).resolve())


def _loading(options: Namespace) -> Any:
    from playground.engine.loading.load import Loading
    return Loading(options.device, options.dtype, options.quantization)


def load_pair(options: Namespace) -> tuple[TwinModels, TwinModels | None]:
    """Target and draft, each twice: as lanes use it, and as the library built it."""
    from playground.bench.speed.baselines import load_twice
    from playground.engine.checkpoint import catalogue
    how, name = _loading(options), options.model or catalogue.BUNDLED[0].name
    second = "" if options.draft == NO_DRAFT else options.draft or catalogue.partner(name)
    packed = second in catalogue.PACKED
    own = replace(
        how, device=options.draft_device or options.device, quantization=second if packed else options.quantization
    )
    target = load_twice(name, how, show_progress)
    return target, load_twice(name if packed else second, own, show_progress) if second else None


def _documents(tasks: list[Task], options: Namespace) -> Iterator[Document]:
    """Everything measured so far, after each record."""
    from playground.bench.speed import speed_report as report
    from playground.bench.speed.timing import compare
    target, draft = load_pair(options)
    texts = _texts(target, draft, tasks, options) if "text" in options.only else []
    comparisons, parts = compare(texts), [part for part in options.only if part != "text"]
    measured = _records(target, parts, options) if parts else ()
    for records in accumulate(([record] for record in measured), initial=[]):
        yield report.document(_settings(options, target, draft), target.model.device, texts, comparisons, records)


def _texts(target: TwinModels, draft: TwinModels | None, tasks: list[Task], options: Namespace) -> list[TimedText]:
    from playground.bench.speed.text_baselines import make_baselines
    from playground.bench.speed.timing import time_rounds
    baselines = make_baselines(target, draft, tasks, options.max_new_tokens, options.compiled)
    return time_rounds(baselines, tasks, options.repeats, RemainingTime())


def _records(target: TwinModels, parts: list[str], options: Namespace) -> Iterator[Measurement]:
    """Of the named model, then of the shapes; each of these is freed before the next is built."""
    from playground.bench.speed.model_shapes import build
    from playground.bench.speed.speed_suite import Suite
    sizes = map(tuple, (options.contexts, options.blocks, options.lanes))
    grid = Grid(*sizes, options.repeats, options.max_new_tokens, options.compiled)
    yield from Suite(target, grid, parts, RemainingTime()).records()
    for name in options.shapes:
        show_progress(0.0, f"building {name}")
        yield from Suite(build(name, _loading(options)), grid, parts, RemainingTime()).records()
        gc.collect()


def _settings(options: Namespace, target: TwinModels, draft: TwinModels | None) -> dict[str, Any]:
    model = target.model
    return {
        "model": model.name,
        "revision": model.revision,
        "parameters": model.parameters,
        "draft": draft.model.name if draft else "",
        "shapes": ", ".join(options.shapes),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "repeats": options.repeats,
        "max_new_tokens": options.max_new_tokens,
    }
