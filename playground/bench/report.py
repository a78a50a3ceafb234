"""A benchmark as plain data, as tables for a terminal and as a page."""
from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from itertools import groupby
from typing import Any

import torch

from playground.bench.contest import Comparison, Spread, Writing

NOTES = """Tokens a second with the prompt's own forward included; median (lowest to highest) of the measured rounds. Everyone
wrote in one process, in turn, round by round; a first round was dropped. `generate` is the transformers library on the
same weights in a network without our seams; our lanes also count encoding the prompt, making text and, where nothing
else is said, recording every event. The ratio is taken within each round. Same text: prompts on which both wrote the
same tokens. All decode greedily. "Own settings" is assisted generation with the library's own number of guesses, all
others guess {guesses} tokens at a time with a draft model and {looked_up} by prompt lookup."""

Rows = list[list[str]]


def machine(device: torch.device) -> dict[str, Any]:
    """What it was measured on."""
    return {"processor": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": _device(device),
            "system": platform.platform(), "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")}}


def document(facts: dict[str, Any], writings: list[Writing], comparisons: list[Comparison]) -> dict[str, Any]:
    """Everything, as JSON."""
    return {"format": "decoding-playground-benchmark", "version": 1, **facts, "measurements": [writing.to_json() for writing in writings],
            "comparisons": [comparison.to_json() for comparison in comparisons]}


def sections(comparisons: list[Comparison]) -> list[tuple[str, Rows]]:
    """A title and a table for each pair of contenders."""
    return [(f"{first} against {second}", [["task", first, second, "ratio", "same text"], *map(_row, group)])
            for (first, second), group in groupby(comparisons, key=lambda comparison: (comparison.first, comparison.second))]


def page(facts: dict[str, Any], comparisons: list[Comparison], notes: str) -> str:
    """The tables in Markdown, with what they were measured on."""
    told = [["", ""], *([name, str(value)] for name, value in {**facts["settings"], **facts["machine"]}.items())]
    parts = ["# Benchmark", "Made by `python -m playground bench --page`.", notes, _markdown(told)]
    for title, rows in sections(comparisons):
        parts += [f"## {title[0].upper()}{title[1:]}", _markdown(rows)]
    return "\n\n".join(parts) + "\n"


def terminal(comparisons: list[Comparison], table: Callable[[Rows], str]) -> str:
    return "\n\n".join(f"{title}\n{table(rows)}" for title, rows in sections(comparisons))


def _row(comparison: Comparison) -> list[str]:
    speeds = [_spread(speed, 1) for speed in comparison.speeds]
    return [comparison.task, *speeds, _spread(comparison.ratio, 2), f"{comparison.same} of {comparison.prompts}"]


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def _markdown(rows: Rows) -> str:
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
