"""A speed benchmark as plain data, as tables for a terminal and as a page. Documents of other machines may be shown
beside one's own.
"""
from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from playground.bench.measurements import Measurement
from playground.bench.speed_tables import BenchRun, Rows, spread_text, tables
from playground.bench.spread import Spread
from playground.bench.survey_export import markdown
from playground.bench.timing import Comparison, TimedText, failures
from playground.errors import Refusal

FORMAT, VERSION = "decoding-playground-benchmark", 2
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NOTES = """Everyone wrote in one process, in turn, round by round; a first round was dropped, and every ratio is taken within a round.
Numbers are medians (lowest to highest) of the measured rounds. All decode greedily. `generate` is the transformers library on
the same weights in a network without our seams, by default with a cache that grows; the hand-written loop is plain torch on the
same weights with keys and values allocated ahead, no events and no choice of strategies. On a GPU times come from the
device's own events. Models named after public ones have their shapes and random weights. In short numbers (bfloat16) tokens that are
about as likely change places by rounding, and whoever computes in another order then writes another text, as long as the others'."""
TEXT_NOTES = """Tokens a second with the prompt's own forward included. Our lanes also count encoding the prompt, making text and, where nothing
else is said, recording every event. Same text: prompts on which both wrote the same tokens. "Own settings" is assisted
generation with the library's own number of guesses, all others guess {guesses} tokens at a time with a draft model and {looked_up} by
prompt lookup."""
Facts = dict[str, Any]
Document = dict[str, Any]


def machine(device: torch.device) -> Facts:
    """What it was measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": _device(device),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }


def document(
    settings: Facts,
    device: torch.device,
    writings: list[TimedText],
    comparisons: list[Comparison],
    records: list[Measurement],
) -> Document:
    """Everything, as JSON."""
    failed = [
        *failures(writings),
        *(f"{r.model}, {r.part} at {r.context}: {r.subject} failed ({r.failure})" for r in records if r.failure),
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "settings": settings,
        "machine": {**machine(device), "kind": device.type},
        "measurements": [writing.to_json() for writing in writings],
        "comparisons": [comparison.to_json() for comparison in comparisons],
        "records": [record.to_json() for record in records],
        "failures": failed,
    }


def read_document(path: str) -> Document:
    """What `document` made, from a file; raises Refusal."""
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise Refusal(
            f"The measurements {path} cannot be read: name a file that `bench speed --json` has written.", "beside"
        ) from None
    if not isinstance(read, dict) or (read.get("format"), read.get("version")) != (FORMAT, VERSION):
        raise Refusal(
            f"The file {path} holds no measurements of this version: name one that `bench speed --json` has written.",
            "beside",
        )
    return read


def sections(documents: list[Document]) -> list[tuple[str, str, Rows, Rows]]:
    """Title, note, rows of every table, and rows that nobody measured; the runs are named A, B, ... in their order."""
    runs = [BenchRun.of(LETTERS[place % len(LETTERS)], document) for place, document in enumerate(documents)]
    named = [f", run {run.name}" if len(runs) > 1 else "" for run in runs]
    compared = [
        (title + name, "", rows, [])
        for name, document in zip(named, documents)
        for title, rows in _compared(document["comparisons"])
    ]
    return [*compared, *((table.title, table.note, table.rows(runs), table.missing(runs)) for table in tables(runs))]


def page(documents: list[Document], notes: str) -> str:
    """The tables in Markdown, with what they were measured on."""
    parts = [
        "# Benchmark",
        "Made by `python -m playground bench speed --page`.",
        NOTES,
        notes,
        "## Runs",
        markdown(_told(documents)),
    ]
    for title, note, rows, missing in sections(documents):
        parts += [f"## {title[0].upper()}{title[1:]}", *[note] * bool(note), markdown(rows + missing)]
    failed = [f"- {failure}" for document in documents for failure in document["failures"]]
    return "\n\n".join([*parts, *["## Failed", "\n".join(failed)] * bool(failed)]) + "\n"


def terminal(document: Document, table: Callable[[Rows], str]) -> str:
    return "\n\n".join(
        [*(f"{title}\n{table(rows)}" for title, _, rows, _ in sections([document])), *document["failures"]]
    )


def _told(documents: list[Document]) -> Rows:
    """Settings and machine of every run, a column each."""
    facts = [{**document["settings"], **document["machine"]} for document in documents]
    names = dict.fromkeys(name for fact in facts for name in fact if name != "kind")
    return [["", *LETTERS[:len(facts)]], *([name, *(str(fact.get(name, "")) for fact in facts)] for name in names)]


def _compared(comparisons: list[dict[str, Any]]) -> list[tuple[str, Rows]]:
    """A title and a table for each pair of contenders."""
    pairs = groupby(comparisons, key=lambda comparison: (comparison["first"], comparison["second"]))
    return [
        (f"{first} against {second}", [["task", first, second, "ratio", "same text"], *map(_row, group)])
        for (first, second), group in pairs
    ]


def _row(comparison: dict[str, Any]) -> list[str]:
    names = ("first_tokens_per_second", "second_tokens_per_second", "ratio")
    first, second, ratio = (comparison[name] and spread_text(Spread(**comparison[name])) for name in names)
    return [
        comparison["task"],
        first or "failed",
        second or "failed",
        ratio or "-",
        f"{comparison['same_text']} of {comparison['prompts']}",
    ]


def _processor() -> str:
    try:
        return processor(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


def processor(told: str) -> str:
    """The first processor that Linux tells of. Clouds hide what it is called, so its family and model say of what
    generation it is.
    """
    lines = (line.partition(":") for line in told.split("\n\n")[0].splitlines())
    first = {name.strip(): value.strip() for name, _, value in lines}
    numbers = [f"{name} {first[key]}" for name, key in (("family", "cpu family"), ("model", "model")) if key in first]
    return ", ".join([first["model name"], *numbers])


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
