"""Results of a speed benchmark as plain data, as terminal tables and as a Markdown page, which can show documents of
other machines as well.
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
from playground.bench.report_text import Rows, markdown_page, section, significant_text
from playground.bench.speed.speed_tables import BenchRun, tables
from playground.bench.speed.timing import Comparison, TimedText, failures
from playground.bench.spread import Spread
from playground.errors import Refusal

FORMAT, VERSION = "decoding-playground-benchmark", 2
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NOTES = """All baselines ran in one process, interleaved round by round; the first round was dropped, and every ratio is
taken within a round. Numbers are medians (lowest to highest) of the measured rounds. All decode greedily. `generate`
is the transformers library on the same weights in a network without our hooks, by default with a dynamic cache; the
hand-written loop is plain torch on the same weights with a preallocated KV cache, no events and no strategies. On a
GPU, times are measured with CUDA events. Models named after public ones have their shapes and random weights. In
bfloat16, rounding can swap tokens of nearly equal probability, so that a baseline with another order of operations
writes another text of the same length."""
TEXT_NOTES = """Tokens per second, prefill included. Our lanes also include encoding the prompt, decoding the text and,
unless stated otherwise, recording every event. Same text: prompts on which both wrote the same tokens. "Own settings"
is assisted generation with the library's own number of draft tokens; all others propose {draft_depth} tokens per round
with a draft model and {lookup_depth} by prompt lookup."""
Facts = dict[str, Any]
Document = dict[str, Any]


def machine(device: torch.device) -> Facts:
    """Hardware and software that a benchmark ran on."""
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
    """All measurements as plain data for JSON."""
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
    """Read a `document` from a file; raises Refusal if it is none of this version."""
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        raise Refusal(
            f"The measurements {path} cannot be read: name a file written by `bench speed --out`.", "beside"
        ) from None
    if not isinstance(read, dict) or (read.get("format"), read.get("version")) != (FORMAT, VERSION):
        raise Refusal(
            f"The file {path} has no measurements of this version: name a file written by `bench speed --out`.",
            "beside",
        )
    return read


def sections(documents: list[Document]) -> list[tuple[str, str, Rows, Rows]]:
    """Title, note, rows and placeholder rows of every table; runs are named A, B, ... in order."""
    runs = [BenchRun.of(LETTERS[index % len(LETTERS)], document) for index, document in enumerate(documents)]
    named = [f", run {run.name}" if len(runs) > 1 else "" for run in runs]
    compared = [
        (title + name, "", rows, [])
        for name, document in zip(named, documents)
        for title, rows in _compared(document["comparisons"])
    ]
    return [*compared, *((table.title, table.note, table.rows(runs), table.missing(runs)) for table in tables(runs))]


def page(documents: list[Document], notes: str) -> str:
    """The tables in Markdown, with settings and machine of each run."""
    tables = [
        section(f"{title[0].upper()}{title[1:]}", rows + missing, note)
        for title, note, rows, missing in sections(documents)
    ]
    failed = "\n".join(f"- {failure}" for document in documents for failure in document["failures"])
    return markdown_page(
        "# Benchmark",
        "Made by `python -m playground bench speed --page`.",
        NOTES,
        notes,
        section("Runs", _facts(documents)),
        *tables,
        *["## Failed", failed] * bool(failed),
    )


def terminal(document: Document, table: Callable[[Rows], str]) -> str:
    return "\n\n".join(
        [*(f"{title}\n{table(rows)}" for title, _, rows, _ in sections([document])), *document["failures"]]
    )


def _facts(documents: list[Document]) -> Rows:
    """Settings and machine, a column per run."""
    facts = [{**document["settings"], **document["machine"]} for document in documents]
    names = dict.fromkeys(name for fact in facts for name in fact if name != "kind")
    return [["", *LETTERS[:len(facts)]], *([name, *(str(fact.get(name, "")) for fact in facts)] for name in names)]


def _compared(comparisons: list[dict[str, Any]]) -> list[tuple[str, Rows]]:
    """A title and a table for each pair of baselines."""
    pairs = groupby(comparisons, key=lambda comparison: (comparison["first"], comparison["second"]))
    return [
        (f"{first} against {second}", [["task", first, second, "ratio", "same text"], *map(_row, group)])
        for (first, second), group in pairs
    ]


def _row(comparison: dict[str, Any]) -> list[str]:
    names = ("first_tokens_per_second", "second_tokens_per_second", "ratio")
    first, second, ratio = (comparison[name] and significant_text(Spread(**comparison[name])) for name in names)
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


def processor(cpuinfo: str) -> str:
    """The first processor in /proc/cpuinfo: model name, family and model number.

    Cloud machines often hide the model name; family and number then identify the generation.
    """
    lines = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    first = {name.strip(): value.strip() for name, _, value in lines}
    numbers = [f"{name} {first[key]}" for name, key in (("family", "cpu family"), ("model", "model")) if key in first]
    return ", ".join([first["model name"], *numbers])


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
