"""Fields of an event that a browser sent. Anybody may send them, so they can be missing, of any type and of any size.

A field that is not what it should be is a Refusal; handlers whose answer nobody reads drop the event.
"""
from __future__ import annotations

from typing import Any

from playground.errors import Refusal
from playground.request_limits import check_text, in_range

MAX_INDEX = 10_000_000  # of a lane, a token, a position; far more than any of them has


def whole_number(event: Any, name: str, most: int = MAX_INDEX) -> int:
    """The field as an integer from 0 to `most`; a float without a fraction counts as one. Raises Refusal."""
    value = _value(event, name)
    if not in_range(value, 0, most) or value != int(value):
        raise _malformed(name, f"a whole number from 0 to {most}")
    return int(value)


def number(event: Any, name: str, low: float, high: float) -> float:
    """The field as a finite number from `low` to `high`; raises Refusal."""
    value = _value(event, name)
    if not in_range(value, low, high):
        raise _malformed(name, f"a number from {low} to {high}")
    return float(value)


def text(event: Any, name: str, most: int) -> str:
    """The field as a text of at most `most` characters; raises Refusal."""
    value = _value(event, name)
    check_text(value, f"field {name} of this event", most)
    return value


def has(event: Any, name: str) -> bool:
    """Whether the event carries the field."""
    return _value(event, name) is not None


def _value(event: Any, name: str) -> Any:
    try:
        return getattr(event, name, None)
    except TypeError:  # what a browser sends in the place of an object has no fields
        return None


def _malformed(name: str, wanted: str) -> Refusal:
    return Refusal(f"The page sent an event whose field {name} is not {wanted}: reload the page and try again.")
