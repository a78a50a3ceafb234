"""Numbers, tables and pages as text, shared by all benchmark reports. Imports neither torch nor gradio."""
from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from playground.bench.spread import Spread

Rows = list[list[str]]  # a table, header first
DIGITS = 6  # significant ones of a stored figure


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def spread_text(spread: Spread | None, digits: int) -> str:
    """Median, with lowest and highest in brackets if they differ."""
    if spread is None:
        return "-"
    median, low, high = (number(value, digits) for value in spread)
    return f"{median} ({low} to {high})" if spread.low < spread.high else median


def significant_text(spread: Spread) -> str:
    """The same with three significant digits; equal digits count as no difference."""
    median, low, high = map(_significant, spread)
    return median if low == high else f"{median} ({low} to {high})"


def _significant(value: float) -> str:
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"


def stored(document: Any) -> Any:
    """Plain data with its floating-point numbers rounded to the digits that are stored."""
    if isinstance(document, float):
        return float(f"{document:.{DIGITS}g}")
    if isinstance(document, dict):
        return {name: stored(value) for name, value in document.items()}
    return [stored(value) for value in document] if isinstance(document, list | tuple) else document


def report_json(document: dict[str, Any]) -> str:
    """A document as JSON for a file, rounded, with a line for each record of its lists, so that differences are read
    record by record.
    """
    entries = (f"{json.dumps(name)}: {_entry(value)}" for name, value in stored(document).items())
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _entry(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(record, separators=(",", ":")) for record in value) + "\n]"


def failure_lines(failures: Iterable[tuple[str, str]]) -> list[str]:
    """A line per failure from names and messages, without repetitions; an empty message is no failure."""
    return list(dict.fromkeys(f"{name}: {message}" for name, message in failures if message))


def markdown(rows: Rows) -> str:
    """A Markdown table whose first row is the header."""
    lines = [f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def facts_table(facts: dict[str, Any]) -> str:
    """A Markdown table of settings and machine."""
    return markdown([["", ""], *([name, str(value)] for part in facts.values() for name, value in part.items())])


def section(title: str, rows: Rows, *notes: str) -> str:
    """A section of a Markdown page: notes, then a table."""
    return paragraphs(f"## {title}", *notes, markdown(rows))


def markdown_page(*parts: str) -> str:
    return paragraphs(*parts) + "\n"


def paragraphs(*parts: str) -> str:
    """Parts with blank lines in between; empty ones are left out."""
    return "\n\n".join(part for part in parts if part)
