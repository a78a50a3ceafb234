"""`study`: analyses of recorded runs, as tables. No model is loaded."""
from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

from playground.cli.shared_options import CommandParser, add_settings
from playground.cli.terminal_view import table
from playground.cli.training.variant import of_kind
from playground.errors import Refusal
from playground.events import Event, Figure, Note
from playground.trace import Trace, check


def study_options(command: CommandParser) -> None:
    command.add_argument("name", metavar="NAME", help="a study, such as scaling_laws; `list` shows them")
    command.add_argument("files", metavar="F.jsonl", nargs="+", help="files written by --trace; every lane counts")
    add_settings(command, "the study")
    command.add_argument("--json", action="store_true", help="print figures and notes as JSON")


def study(options: Namespace) -> bool:
    """Print the figures and notes of a study; raises Refusal if a file is unreadable or there is nothing to study."""
    method = of_kind("study", options)
    events = method.draw([lane for path in options.files for lane in lanes(path)])
    print(json.dumps([event.to_json() for event in events]) if options.json else "\n\n".join(printed(events)))
    return False


def lanes(path: str) -> list[Trace]:
    """Each lane of a trace file as a separate trace; raises Refusal for an inconsistent file."""
    trace = Trace.load(path)
    if complaints := check(trace):
        raise Refusal(f"{path} is inconsistent, so it cannot be studied: {complaints[0]}.", "file")
    return [trace.lane(header.lane) for header in trace.headers]


def printed(events: Iterable[Event]) -> list[str]:
    """One block of text per figure, merging figure events of the same name, and one for the notes."""
    events = list(events)
    figures: dict[str, list[Figure]] = {}
    for event in events:
        if isinstance(event, Figure):
            figures.setdefault(event.name, []).append(event)
    notes = [event.text for event in events if isinstance(event, Note)]
    return [f"{name}\n{SHAPES[parts[0].shape](parts)}" for name, parts in figures.items()] + (
        ["\n".join(notes)] if notes else []
    )


def _scalar(parts: list[Figure]) -> str:
    names = list(dict.fromkeys(name for part in parts for name in part.data["series"]))
    rows = [
        ["x", *names],
        *([str(part.data["x"]), *(_number(part.data["series"].get(name)) for name in names)] for part in parts),
    ]
    limits = {name: value for part in parts for name, value in part.data.get("lines", {}).items()}
    return "\n".join([table(rows), *(f"{name}: {_number(value)}" for name, value in limits.items())])


def _bars(parts: list[Figure]) -> str:
    last = parts[-1].data
    return table([[str(label), _number(value)] for label, value in zip(last["labels"], last["values"])])


def _matrix(parts: list[Figure]) -> str:
    last = parts[-1].data
    return table(
        [
            ["", *map(str, last["columns"])],
            *([str(row), *map(_number, values)] for row, values in zip(last["rows"], last["values"])),
        ]
    )


def _tree(parts: list[Figure]) -> str:
    """Nodes indented below their parents; parents come before their children."""
    last, depths = parts[-1].data, []
    for parent in last["parents"]:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return table(
        [
            ["  " * depth + str(label), _number(value)]
            for label, depth, value in zip(last["labels"], depths, last["values"])
        ]
    )


def _spans(parts: list[Figure]) -> str:
    return table(
        [
            [f"{start} to {end}", str(label), _number(value)]
            for part in parts
            for start, end, label, value in part.data["spans"]
        ]
    )


def _points(parts: list[Figure]) -> str:
    points = [point for part in parts for point in part.data.get("points", ())]
    arrows = [
        [_number(x), _number(y), str(label), "arrow"] for part in parts for x, y, label in part.data.get("path", ())
    ]
    return table(
        [
            [_number(x), _number(y), str(label), f"{group}, crossed out" if crossed else str(group)]
            for x, y, label, group, crossed in points
        ]
        + arrows
    )


SHAPES: dict[str, Callable[[list[Figure]], str]] = {
    "scalar": _scalar, "bars": _bars, "matrix": _matrix, "tree": _tree, "spans": _spans, "points": _points}


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
