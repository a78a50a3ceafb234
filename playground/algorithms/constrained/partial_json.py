"""Reads the beginning of a JSON document: what it already says, and where more may follow."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import inf
from typing import Any

from playground.errors import Refusal
from playground.grammar.limits import NUMBER_DIGITS, SCHEMA_DEPTH

STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
NUMBER = re.compile(r"-?[0-9]{1,1000}(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
LITERALS = {"true": True, "false": False, "null": None}


class _Unfinished:
    """A value that has begun, of which nothing is known; or an end that is not there."""


UNFINISHED = _Unfinished()


@dataclass(frozen=True)
class Open:
    """An object or an array that is not closed: a dict or list of what it holds so far."""

    value: dict[str, Any] | list[Any]


class PartialReader:
    """Reads one document from its beginning."""

    def __init__(self, text: str):
        self.text, self.place = text, 0

    def value(self, depth: int = 0) -> Any:
        """A value as `json.loads` gives it, an Open, or UNFINISHED. Raises Refusal if it is nested too deeply."""
        if depth > SCHEMA_DEPTH:
            raise Refusal("The document is nested too deeply to be checked: bound its depth.", "constraint")
        match self._next():
            case "{":
                return self._container({}, "}", depth)
            case "[":
                return self._container([], "]", depth)
            case '"':
                return self._matched(STRING)
            case "t" | "f" | "n":
                return self._literal()
        return self._number()

    def _next(self) -> str:
        """The next character that is no white space; empty at the end."""
        while self.text[self.place:self.place + 1] in (" ", "\n", "\r", "\t"):
            self.place += 1
        return self.text[self.place:self.place + 1]

    def _matched(self, pattern: re.Pattern) -> Any:
        found = pattern.match(self.text, self.place)
        if found is None:
            self.place = len(self.text)
            return UNFINISHED
        self.place = found.end()
        return json.loads(found[0], strict=False)

    def _number(self) -> Any:
        start, number = self.place, self._matched(NUMBER)
        if self.place == len(self.text):
            return UNFINISHED  # it may go on
        if self.place - start > NUMBER_DIGITS or abs(number) == inf:
            raise Refusal("A number of the document is too large to be checked: bound it.", "constraint")
        return number

    def _literal(self) -> Any:
        for word, value in LITERALS.items():
            if self.text.startswith(word, self.place):
                self.place += len(word)
                return value
        self.place = len(self.text)
        return UNFINISHED

    def _container(self, found: dict | list, end: str, depth: int) -> Any:
        self.place += 1
        while (character := self._next()) and character != end:
            if character == ",":
                self.place += 1
            elif isinstance(found, list):
                found.append(self.value(depth + 1))
            else:
                self._member(found, depth)
        self.place += 1
        return found if character else Open(found)

    def _member(self, found: dict, depth: int) -> None:
        key = self._matched(STRING)
        if key is UNFINISHED:
            return
        found[key] = UNFINISHED
        if self._next() == ":":
            self.place += 1
            found[key] = self.value(depth + 1) if self._next() else UNFINISHED


def read_partial(text: str) -> Any:
    """The beginning of a document as a value; lists and dicts that are not closed are Open."""
    return PartialReader(text).value()


def inside_string(text: str) -> bool:
    """Whether a document breaks off inside a string."""
    return '"' in STRING.sub("", text)
