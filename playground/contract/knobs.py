"""Knobs: the annotated fields of a strategy that a person may set."""
from __future__ import annotations

import json
from dataclasses import Field, dataclass, field
from typing import Any

from playground.errors import Refusal
from playground.request_limits import QUOTED, check_text, quoted, without_mark

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def knob(default: Any, low: float | None = None, high: float | None = None, *, help: str, step: float | None = None,
         choices: tuple[str, ...] = (), multiline: bool = False, file: bool = False, json_text: bool = False) -> Any:
    """Declare a knob: a slider if it has limits, a menu if it has choices, a text box otherwise.

    `file` marks a text that the command line can also read from a file, given as `file=PATH`; `json_text` one in JSON,
    which programs can also give as the value itself, such as a dict.
    """
    meta = {
        "low": low,
        "high": high,
        "step": step,
        "help": help,
        "choices": choices,
        "multiline": multiline,
        "file": file,
        "json_text": json_text,
    }
    return field(default=default, metadata=meta)


def slot(default: str) -> Any:
    """Declare a slot: a field filled by another strategy of the annotated kind. `default` is that strategy's name."""
    return field(default=default, metadata={"slot": True})


AnyType = type[Any]


@dataclass(frozen=True)
class Knob:
    """A knob as the command line, the page and the API see it."""

    name: str
    type: AnyType
    default: Any
    min: float | None
    max: float | None
    step: float | None
    help: str
    choices: tuple[str, ...]
    multiline: bool
    file: bool
    json_text: bool = False

    @classmethod
    def of(cls, declared: Field, type: AnyType) -> Knob:
        """The knob that a dataclass field declares."""
        keys = ("low", "high", "step", "help", "choices", "multiline", "file", "json_text")
        return cls(declared.name, type, declared.default, *(declared.metadata[key] for key in keys))

    @property
    def label(self) -> str:
        """The name as the page shows it."""
        words = self.name.replace("_", " ")
        return words[:1].upper() + words[1:]

    def read(self, value: Any) -> Any:
        """Convert `value`, possibly typed by a person, to this knob's type. Raises Refusal if it does not fit."""
        converted = self._convert(value)
        if self.choices and converted not in self.choices:
            raise Refusal(f"{self.label} must be one of {', '.join(self.choices)}, not {quoted(value)}.", self.name)
        if isinstance(converted, (int, float)) and not self._within(converted):
            shown = value[:QUOTED] if isinstance(value, str) else quoted(value)
            raise Refusal(f"{self.label} must be between {self.min} and {self.max}, not {shown}.", self.name)
        return converted

    def _convert(self, value: Any) -> Any:
        try:
            if self.type is bool and isinstance(value, str):
                return BOOLEANS[value.lower()]
            if self.type is int and isinstance(value, float) and not value.is_integer():
                raise ValueError
            return self._text(value) if self.type is str else self.type(value)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            expected = "a JSON text or value" if self.json_text else TYPE_NAMES[self.type]
            raise Refusal(f"{self.label} must be {expected}, not {quoted(value)}.", self.name) from None

    def _text(self, value: Any) -> str:
        """A text as it is, a number as written, and another value as JSON if the knob takes JSON."""
        if self.json_text and not isinstance(value, str):
            return json.dumps(value, allow_nan=False)
        if not isinstance(value, (str, int, float)):
            raise TypeError
        text = without_mark(str(value))
        check_text(text, f"knob {self.name}", about=self.name)
        return text

    def _within(self, value: float) -> bool:
        above = self.min is None or value >= self.min
        number = value == value  # math.isnan refuses integers that are too large for a float
        return number and above and (self.max is None or value <= self.max)
