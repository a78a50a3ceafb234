"""Figures about the generated tokens of a text, as overlays draw them."""
from __future__ import annotations

import math
from collections.abc import Sequence

from playground.events import Figure

SHOWN = 48  # newest tokens in a matrix
DIGITS = 4
Numbers = Sequence[float]


def shaded(name: str, values: Numbers, labels: Sequence[str], parts: Sequence[list[str]] = ()) -> Figure:
    """Colours each generated token by a value from 0 to 1, with words that appear at the token; NaN is left out.

    parts: for each token those that its words name, as `switch_part` reads them; empty if none can be switched.
    """
    kept = [at for at, value in enumerate(values) if not math.isnan(value)]
    spans = [[at, at + 1, labels[at], round(min(1.0, max(0.0, values[at])), DIGITS)] for at in kept]
    named = {"parts": [parts[at] for at in kept]} if parts else {}
    return Figure("spans", name, {"spans": spans, "shades": True, **named})


def by_token(name: str, rows: Sequence[str], pieces: Sequence[str], values: Sequence[Numbers]) -> Figure:
    """A matrix [rows][tokens] of the newest tokens."""
    return matrix(name, rows, pieces[-SHOWN:], [row[-SHOWN:] for row in values])


def matrix(name: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Numbers]) -> Figure:
    """A matrix of numbers; NaN is a gap."""
    known = [[None if math.isnan(value) else round(value, DIGITS) for value in row] for row in values]
    return Figure("matrix", name, {"rows": list(rows), "columns": list(columns), "values": known})


def over_tokens(name: str, series: dict[str, Numbers]) -> list[Figure]:
    """Numbers for each generated token, as curves below the entropy; NaN is left out."""
    length = max(map(len, series.values()), default=0)
    points = [
        {key: round(values[at], DIGITS) for key, values in series.items()
         if at < len(values) and not math.isnan(values[at])}
        for at in range(length)
    ]
    return [Figure("scalar", name, {"x": at, "series": point}) for at, point in enumerate(points) if point]


def bars(name: str, labels: Sequence[str], values: Numbers) -> Figure:
    return Figure("bars", name, {"labels": list(labels), "values": [round(value, DIGITS) for value in values]})


def numbered(word: str, count: int) -> list[str]:
    """ "layer 0", "layer 1", ... """
    return [f"{word} {number}" for number in range(count)]
