"""`bench` and `bench speed`: how fast everything is, beside the transformers library and what the machine allows."""
from __future__ import annotations

import gc
import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from playground import NO_DRAFT
from playground.bench.speed_defaults import Grid
from playground.bench.speed_prompts import DEFAULT, Task, read_tasks
from playground.cli.input_files import check_place, write_text
from playground.cli.load_models import hush, tell
from playground.cli.terminal_view import table

if TYPE_CHECKING:
    from playground.bench.baselines import TwinModels
    from playground.bench.measurements import Measurement
    from playground.bench.speed_report import Document
    from playground.bench.timing import TimedText


def measure(options: Namespace) -> bool:
    """Measure, print the tables, and write what was asked for."""
    tasks = read_tasks(options.prompts or DEFAULT)
    for path in (options.json, options.page):
        check_place(path)
    set_up(options)
    from playground.bench import baselines as contenders  # not before: it brings torch along
    from playground.bench import speed_report as report  # not before: it brings torch along
    beside = [report.read_document(path) for path in options.beside]
    for document in _documents(tasks, options):
        # a large model takes long, and a run that is cut keeps what it has
        write_text(options.json, json.dumps(document, indent=1))
    tell(1.0, "")
    print(report.terminal(document, table))
    notes = report.TEXT_NOTES.format(guesses=contenders.GUESSES, looked_up=contenders.LOOKED_UP)
    write_text(options.page, report.page([document, *beside], notes))
    return False


def set_up(options: Namespace) -> None:
    """Threads, quiet libraries, and a refusal of shapes that this machine cannot hold, before anything is loaded."""
    import torch

    from playground.bench.model_shapes import check
    if not options.verbose:
        hush()
    if options.threads:
        torch.set_num_threads(options.threads)
    for name in options.shapes:
        check(name, _loading(options).resolve())


def _loading(options: Namespace) -> Any:
    from playground.engine.load import Loading
    return Loading(options.device, options.dtype, options.quantization)


def load_pair(options: Namespace) -> tuple[TwinModels, TwinModels | None]:
    """Target and draft, each twice: as lanes take it, and as the library made it."""
    from playground.bench.baselines import load_twice
    from playground.engine import catalogue
    how, name = _loading(options), options.model or catalogue.BUNDLED[0].name
    second = "" if options.draft == NO_DRAFT else options.draft or catalogue.partner(name)
    packed = second in catalogue.PACKED
    own = replace(
        how, device=options.draft_device or options.device, quantization=second if packed else options.quantization
    )
    return load_twice(name, how, tell), load_twice(name if packed else second, own, tell) if second else None


def _documents(tasks: list[Task], options: Namespace) -> Iterator[Document]:
    """What is measured so far, again after each record."""
    from playground.bench import speed_report as report
    from playground.bench import timing as contest
    target, draft = load_pair(options)
    writings = _texts(target, draft, tasks, options) if "text" in options.only else []
    comparisons, parts = contest.compare(writings), [part for part in options.only if part != "text"]
    found = _records(target, parts, options) if parts else ()
    for records in accumulate(([record] for record in found), initial=[]):
        yield report.document(_settings(options, target, draft), target.model.device, writings, comparisons, records)


def _texts(target: TwinModels, draft: TwinModels | None, tasks: list[Task], options: Namespace) -> list[TimedText]:
    from playground.bench.baselines import Size, contenders
    from playground.bench.timing import contest
    size = Size.of(tasks, target.model, options.max_new_tokens)
    return contest(contenders(target, draft, size, options.compiled), tasks, options.repeats, tell)


def _records(target: TwinModels, parts: list[str], options: Namespace) -> Iterator[Measurement]:
    """Of the model that was named, then of the shapes; each of these is let go of before the next is built."""
    from playground.bench.model_shapes import build
    from playground.bench.speed_suite import Suite
    sizes = map(tuple, (options.contexts, options.blocks, options.lanes))
    grid = Grid(*sizes, options.repeats, options.max_new_tokens, options.compiled)
    yield from Suite(target, grid, parts, tell).records()
    for name in options.shapes:
        tell(0.0, f"building {name}")
        yield from Suite(build(name, _loading(options)), grid, parts, tell).records()
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
