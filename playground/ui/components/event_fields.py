"""Read the fields of an event sent by a browser. They are untrusted: missing, of any type or of any size.

A malformed field raises Refusal; handlers without an output ignore the event.
"""
from __future__ import annotations

from typing import Any

from playground.errors import Refusal
from playground.request_limits import check_text, in_range

MAX_INDEX = 10_000_000  # of a lane, token or position; far above any real index


def whole_number(event: Any, name: str, most: int = MAX_INDEX) -> int:
    """The field as an integer from 0 to `most`; a float with an integral value is accepted. Raises Refusal."""
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
    """The field as a string of at most `most` characters; raises Refusal."""
    value = _value(event, name)
    check_text(value, f"field {name} of this event", most)
    return value


def has(event: Any, name: str) -> bool:
    """Whether the event carries the field."""
    return _value(event, name) is not None


def _value(event: Any, name: str) -> Any:
    try:
        return getattr(event, name, None)
    except TypeError:  # the browser sent something other than an object
        return None


def _malformed(name: str, wanted: str) -> Refusal:
    return Refusal(f"The page sent an event whose field {name} is not {wanted}: reload the page and try again.")
