"""Recorded runs of strategies that no bundled model can run, drawn in their entries of the library.

tools/record_library_runs.py records them on tiny models; each is a trace in assets/traces/library. A drawing has a
column for each position of the canvas and a row for each forward.
"""
from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from playground.asset_files import ASSETS
from playground.contract import Strategy
from playground.events import Event, Figure, Fill, Forward
from playground.trace import Trace
from playground.trace.result import Result

RUNS = ASSETS / "traces" / "library"
LOAD = {
    "wedlm": "tencent/WeDLM-8B-Instruct (8 billion parameters)",
    "entropy_bound": "google/diffusiongemma-26B-A4B-it (26 billion parameters)",
}
"""By strategy, a published model to load."""
LEGEND = {"now": "filled", "kept": "accepted, may change", "open": "open", "done": "filled before"}
CHOSEN = ("certain", "accepted")  # what labels of a figure say of positions that a forward chooses
LEFT, CELL, GAP, WORDS, LINE = 26, 17, 2, 68, 18  # pixels


class Row(NamedTuple):
    """One forward: the positions that were filled after it, by it and before it, and those that it chose or left."""

    now: set[int]
    kept: set[int]
    open: set[int]
    done: set[int]


def recorded_run(cls: type[Strategy]) -> str:
    """The recorded run of a strategy as HTML; empty if it has none."""
    path = RUNS / f"{cls.name}.jsonl"
    if not path.is_file():
        return ""
    trace = Trace.load(path)
    result, rows = Result(trace), rows_of([stamped.event for stamped in trace.events])
    return (
        f"<figure class='recorded'><figcaption>Recorded on a {escape(result.header.model)}: no bundled model can run "
        f"it. To run it, load {LOAD[cls.name]}.</figcaption>{drawing(rows, pieces_of(trace))}{_legend(rows)}"
        f"<p class='said'>{escape(result.header.prompt)}<b>{escape(result.text)}</b></p></figure>"
    )


def rows_of(events: list[Event]) -> list[Row]:
    """What each forward did, in order."""
    rows: list[Row] = []
    for event in events:
        done = set().union(*(row.now for row in rows))
        if isinstance(event, Forward):
            rows.append(Row(set(), set(), set(), done))
        elif isinstance(event, Figure) and event.shape == "bars":
            for label in event.data["labels"]:
                place, said = label.split()
                (rows[-1].kept if said in CHOSEN else rows[-1].open).add(int(place) - 1)
        elif isinstance(event, Fill):
            rows[-1].now.update(event.positions)
    return rows


def pieces_of(trace: Trace) -> list[str]:
    """The token of each position."""
    filled = {
        position: piece for stamped in trace.events if isinstance(stamped.event, Fill)
        for position, piece in zip(stamped.event.positions, stamped.event.pieces)
    }
    return [filled[position].strip() for position in sorted(filled)]


def drawing(rows: list[Row], pieces: list[str]) -> str:
    """The forwards of a run as SVG, under the words that were written."""
    width, height = LEFT + CELL * len(pieces) + LINE, WORDS + CELL * len(rows) + GAP
    words = "".join(
        f"<text class='word' transform='translate({LEFT + CELL * place + 12} {WORDS - 4}) rotate(-60)'>"
        f"{escape(piece)}</text>" for place, piece in enumerate(pieces)
    )
    numbers = "".join(
        f"<text class='number' x='{LEFT - 5}' y='{WORDS + CELL * row + 13}'>{row + 1}</text>"
        for row in range(len(rows)) if row % 5 == 4 or row in (0, len(rows) - 1) and len(rows) % 5 != 1
    )
    return (f"<div class='drawing' tabindex='0'><svg width='{width}' height='{height}' role='img' "
            f"aria-label='{escape(said(rows))}'>{words}{numbers}{''.join(_cells(rows))}</svg></div>")


def said(rows: list[Row]) -> str:
    """The run in words."""
    counts = ", ".join(str(len(row.now)) for row in rows)
    return f"{len(rows)} forwards; positions filled after each: {counts}"


def _cells(rows: list[Row]) -> Iterator[str]:
    """A path for the cells of each kind; where a position is of several kinds, the first counts."""
    size = CELL - GAP
    for kind in LEGEND:
        places = [
            (LEFT + CELL * place, WORDS + CELL * number) for number, row in enumerate(rows)
            for place in sorted(getattr(row, kind)) if kind == _kind(row, place)
        ]
        if places:
            path = "".join(f"M{x} {y}h{size}v{size}h-{size}z" for x, y in places)
            yield f"<path class='{kind}' d='{path}'/>"


def _kind(row: Row, place: int) -> str:
    return next(kind for kind in ("now", "kept", "open", "done") if place in getattr(row, kind))


def _legend(rows: list[Row]) -> str:
    found = {_kind(row, place) for row in rows for place in set().union(*row)}
    keys = "".join(f"<li><i class='{kind}'></i>{text}</li>" for kind, text in LEGEND.items() if kind in found)
    return f"<ul class='keys' aria-hidden='true'><li>A row for each forward:</li>{keys}</ul>"
