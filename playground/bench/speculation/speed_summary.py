"""One line for each speculative strategy: its measured speed, for the library page.

`python -m playground bench speculation --summary assets/speculation.json` writes them. Imports no torch.
"""
from __future__ import annotations

import json
from functools import cache
from statistics import median
from typing import Any

from playground.asset_files import ASSETS


def summary(document: dict[str, Any]) -> dict[str, Any]:
    """`measured`: models and machine. `strategies`: by name the lane with the highest median speed-up over the tasks,
    that median, its slowest and fastest task with their speed-ups, and the median of its tokens per target forward.

    Lanes that wrote another text than the plain lane, or failed on a task, are left out.
    """
    theirs = {row["theirs"] for row in document["library"]}
    rows = [row for row in document["table"] if row["entrant"] not in theirs]
    plain, *lanes = dict.fromkeys(row["entrant"] for row in rows)  # the plain lane is the first one of every task
    found = [line for lane in lanes if (line := _line([row for row in rows if row["entrant"] == lane]))]
    best: dict[str, dict[str, Any]] = {}
    for line in sorted(found, key=lambda line: line["speed_up"]):
        best[line["lane"].partition(":")[0]] = line
    settings, machine = document["settings"], document["machine"]
    about = {name: settings[name] for name in ("model", "draft", "questions", "repeats")}
    return {
        "measured": about | {name: machine[name] for name in ("processor", "threads")},
        "strategies": dict(sorted(best.items())),
    }


def _line(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The line of one lane from its rows, one for each task; None if it is not the plain lane's text throughout."""
    if any(row["failed"] or not row["times_as_fast"] or row["same_text"] != row["compared"] for row in rows):
        return None
    times = {row["task"]: round(row["times_as_fast"]["median"], 2) for row in rows}
    per_forward = [row["tokens_per_target_forward"] for row in rows if row["tokens_per_target_forward"]]
    slowest, fastest = (choose(times, key=times.get) for choose in (min, max))
    return {
        "lane": rows[0]["entrant"],
        "tasks": len(times),
        "speed_up": round(median(times.values()), 2),
        "slowest": [slowest, times[slowest]],
        "fastest": [fastest, times[fastest]],
        "tokens_per_target_forward": round(median(per_forward), 2) if per_forward else None,
    }


@cache
def bundled() -> dict[str, Any]:
    """The summary of the bundled models."""
    return json.loads((ASSETS / "speculation.json").read_text(encoding="utf-8"))


def sentence(name: str) -> str:
    """The measured speed of a strategy on the bundled models; empty if it was not measured."""
    line, measured = bundled()["strategies"].get(name), bundled()["measured"]
    if line is None:
        return ""
    ends = " to ".join(f"{times:.2f} on {task}" for task, times in (line["slowest"], line["fastest"]))
    named = f" ({line['lane']})" if ":" in line["lane"] else ""
    tokens = line["tokens_per_target_forward"]
    saved = f"; {tokens:.2f} tokens per target forward" if tokens else ""
    return (
        f"{line['speed_up']:.2f} times the plain lane's{named}, the median of {line['tasks']} tasks, {ends}{saved}. "
        f"Measured with {measured['model']} and {measured['draft']} on {measured['processor']}, "
        f"threads: {measured['threads']}"
    )
