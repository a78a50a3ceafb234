"""`bench`: the project's own benchmark."""
from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playground import NO_DRAFT
from playground.bench.prompts import DEFAULT, read_tasks
from playground.shell.files import check_place
from playground.shell.models import hush, tell
from playground.shell.screen import table

if TYPE_CHECKING:
    from playground.bench.contenders import Loaded


def measure(options: Namespace) -> bool:
    """Measure, print the tables, and write what was asked for."""
    tasks = read_tasks(options.prompts or DEFAULT)
    for path in (options.json, options.page):
        check_place(path)
    target, draft = _load(options)
    from playground.bench import contenders, contest, report  # not before: it brings torch along
    everyone = contenders.contenders(target, draft, options.max_new_tokens)
    writings = contest.contest(everyone, tasks, options.repeats, tell)
    tell(1.0, "")
    comparisons, facts = contest.compare(writings), {"settings": _settings(options, target, draft), "machine": report.machine(target.model.device)}
    print(report.terminal(comparisons, table))
    _write(options.json, json.dumps(report.document(facts, writings, comparisons), indent=1))
    notes = report.NOTES.format(guesses=contenders.GUESSES, looked_up=contenders.LOOKED_UP)
    _write(options.page, report.page(facts, comparisons, notes))
    return False


def _load(options: Namespace) -> tuple[Loaded, Loaded | None]:
    import torch

    from playground.bench.contenders import load_twice
    from playground.engine import catalogue
    from playground.engine.load import Loading
    if not options.verbose:
        hush()
    if options.threads:
        torch.set_num_threads(options.threads)
    how, name = Loading(options.device, options.dtype, options.quantization), options.model or catalogue.BUNDLED[0].name
    second = "" if options.draft == NO_DRAFT else options.draft or catalogue.partner(name)
    return load_twice(name, how, tell), load_twice(second, how, tell) if second else None


def _settings(options: Namespace, target: Loaded, draft: Loaded | None) -> dict[str, Any]:
    model = target.model
    return {"model": model.name, "revision": model.revision, "parameters": model.parameters, "draft": draft.model.name if draft else "",
            "dtype": str(model.dtype).removeprefix("torch."), "quantization": model.quantization, "repeats": options.repeats,
            "max_new_tokens": options.max_new_tokens}


def _write(path: str | None, text: str) -> None:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
