"""A sweep over one or two knobs of a lane: the values as typed, and the lanes of the grid."""
from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from playground.contract import find
from playground.contract.knobs import Knob
from playground.errors import Refusal
from playground.request_limits import Rules, check_text, quoted
from playground.ui.components.settings import MOST_WRITTEN, Settings

MOST_VALUES = 5  # of one knob
LONGEST = 200  # characters of the values as typed
RANGE = re.compile(r"([^,\s]+?)\s*\.\.\s*([^,\s]+?)(?:\s+by\s+([^,\s]+))?")
EXAMPLE = "such as 0.2, 0.7, 1.2 or 0.2..1.2 or 0.2..1.2 by 0.5"


@dataclass(frozen=True)
class Axis:
    """A knob and its values, along the rows or the columns of a grid."""

    key: str  # "strategy.knob"
    label: str
    values: list[Any]


@dataclass(frozen=True)
class KnobSweep:
    """The grid of one lane: rows by one knob, columns by another or a single column."""

    rows: Axis
    columns: Axis | None

    @property
    def width(self) -> int:
        return len(self.columns.values) if self.columns else 1

    def lanes(self, lane: dict[str, Any]) -> list[dict[str, Any]]:
        """The lanes of the cells, row by row."""
        return [
            with_knob(row, self.columns.key, across) if self.columns else row
            for row in (with_knob(lane, self.rows.key, value) for value in self.rows.values)
            for across in (self.columns.values if self.columns else [None])
        ]


def swept(settings: Settings, lane: int, sweep: KnobSweep, rules: Rules) -> Settings:
    """The settings with a lane for each cell; all have the same seed, so they share their random numbers.

    Raises Refusal beyond the limits.
    """
    lanes = sweep.lanes(settings.lanes[lane])
    if not 2 <= len(lanes) <= rules.repeats:
        raise Refusal(
            f"The grid must have from 2 to {rules.repeats} cells, not {len(lanes)}: change the values.", "sweep"
        )
    if len(lanes) * settings.length > MOST_WRITTEN:
        raise Refusal(
            f"{len(lanes)} cells of {settings.length} tokens exceed the limit of {MOST_WRITTEN:,} tokens: choose fewer "
            "values or tokens.",
            "sweep",
        )
    return replace(settings, lanes=lanes)


def knobs_of(lane: dict[str, Any]) -> dict[str, tuple[str, Knob]]:
    """The knobs of a lane that can be swept, by key: label and knob. Texts of several lines and files cannot.

    Raises Refusal for an unknown strategy.
    """
    return dict(_knobs(lane))


def _knobs(lane: dict[str, Any]) -> Iterator[tuple[str, tuple[str, Knob]]]:
    for name in (lane["strategy"], *(extra[0] for extra in lane.get("extras") or [])):
        strategy = find(name)
        for knob in strategy.knobs():
            if not (knob.multiline or knob.file or knob.json_text):
                yield f"{name}.{knob.name}", (f"{strategy.title}: {knob.label}", knob)


def with_knob(lane: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The lane with a knob of its decoder, or of a strategy added to it, set to a value."""
    strategy, knob = key.split(".")
    if strategy == lane["strategy"]:
        return {**lane, "knobs": {**(lane.get("knobs") or {}), knob: value}}
    extras = [[name, {**given, knob: value} if name == strategy else given] for name, given in lane.get("extras") or []]
    return {**lane, "extras": extras}


def axis(lane: dict[str, Any], key: Any, typed: Any) -> Axis:
    """A knob of the lane with the values typed for it. Raises Refusal."""
    known = knobs_of(lane)
    if not known:
        raise Refusal("This lane has no knob: choose another lane, or add a sampler to it.", "sweep")
    if key not in known:
        raise Refusal("This lane has no such knob: choose one from the menu.", "sweep")
    label, knob = known[key]
    return Axis(key, label, values_of(typed, knob))


def values_of(typed: Any, knob: Knob) -> list[Any]:
    """The values of a list, "0.2, 0.7", or of a range, "0.2..1.2" or "0.2..1.2 by 0.5", without repetitions.

    Raises Refusal for values that the knob does not take, and for none or too many.
    """
    check_text(typed, "list of values", LONGEST, "sweep")
    if knob.type in (int, float) and (given := RANGE.fullmatch(typed.strip())):
        values = _range(*given.groups(), knob)
    else:
        values = [knob.read(value.strip()) for value in typed.split(",") if value.strip()]
    values = list(dict.fromkeys(values))
    if not values:
        raise Refusal(f"{knob.label} has no values: write some, {EXAMPLE}.", "sweep")
    _check_count(len(values), knob)
    return values


def _range(low: str, high: str, step: str | None, knob: Knob) -> list[Any]:
    """Values from low to high; without a step MOST_VALUES at equal distances, or fewer whole numbers."""
    first, last = knob.read(low), knob.read(high)
    distance = _number(step) if step else _distance(first, last, knob)
    if not (math.isfinite(first) and math.isfinite(last) and first <= last and distance > 0):
        raise Refusal(f"The range of {knob.label} must go up by more than 0: write it {EXAMPLE}.", "sweep")
    count = math.floor(min((last - first) / distance, 1e6) + 1e-9) + 1
    _check_count(count, knob)
    return [knob.read(_rounded(first + i * distance)) for i in range(count)]


def _distance(first: float, last: float, knob: Knob) -> float:
    distance = (last - first) / (MOST_VALUES - 1)
    return (math.ceil(distance) if knob.type is int else distance) or 1


def _number(step: str) -> float:
    try:
        return float(step)
    except ValueError:
        said = f"The step of a range must be a number, not {quoted(step)}: write it {EXAMPLE}."
        raise Refusal(said, "sweep") from None


def _rounded(value: float) -> float:
    """Without the error of adding binary fractions: 0.1 + 0.2 is 0.3 for a person."""
    return float(f"{value:.9g}")


def _check_count(count: int, knob: Knob) -> None:
    if count > MOST_VALUES:
        raise Refusal(f"{knob.label} has {count} values; at most {MOST_VALUES} are allowed: remove some.", "sweep")
