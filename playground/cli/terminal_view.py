"""Terminal output of a run, live or recorded: the text as it grows, then a table of costs.

Imports neither torch nor gradio. Model output is untrusted: control characters do not reach the terminal.
"""
from __future__ import annotations

import re
import sys
from typing import Any

from playground.cli.shell_words import in_shell_words
from playground.events import Done, Failed, Header, Judged, Stamped
from playground.trace.comparison import baseline_of
from playground.trace.result import Result, cut
from playground.trace.transcript import Written, advance

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line break
COLUMNS = ("lane", "tokens", "seconds", "tokens/s", "per forward", "accepted", "wasted", "ended")


class Screen:
    """Shows events one by one. A single lane's text appears as it grows; of several lanes, each appears when complete.
    """

    def __init__(self, headers: list[Header]):
        self._headers = {header.lane: header for header in headers}
        self._texts: dict[int, dict[int, Written]] = {lane: {0: Written()} for lane in self._headers}
        self._shown = ""

    def show(self, stamped: Stamped) -> None:
        advance(self._texts[stamped.lane], stamped)
        over = isinstance(stamped.event, (Done, Failed))
        if len(self._headers) == 1:
            self._grow(self._text(stamped.lane, over), over)
        elif over and (text := self._text(stamped.lane, over)):
            _write(f"--- {self._headers[stamped.lane].strategy}\n{text}\n")

    def _text(self, lane: int, over: bool) -> str:
        text, stops = self._texts[lane][0].text, self._headers[lane].stop
        return CONTROL.sub("\ufffd", cut(text, stops) if over else settled(text, stops))

    def _grow(self, text: str, over: bool) -> None:
        """Write the new text. If text was rolled back, write the remaining text again on a new line."""
        if not text.startswith(self._shown):
            _write("\n[rolled back]\n")
            self._shown = ""
        _write(text[len(self._shown):] + "\n" * (over and text != ""))
        self._shown = text


def settled(text: str, stops: list[str]) -> str:
    """The part of a growing text that can be shown: its last characters are held back if they may begin a stop string.
    """
    text = cut(text, stops)
    held = max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)
    return text[:len(text) - held]


def report(results: list[Result]) -> str:
    """Costs of all lanes, whether they wrote the same text, and why lanes failed."""
    failures = [f"{result.strategy}: {in_shell_words(result.message)}" for result in results if result.message]
    return "\n".join([costs(results, _remarks(results)), *failures])


def costs(results: list[Result], remarks: list[str] | None = None) -> str:
    """A table of the main metrics, a row per lane, with a remark at its end."""
    rows = [list(COLUMNS), *(_cost(result) for result in results)]
    for row, remark in zip(rows, ["", *(remarks or [""] * len(results))]):
        row.append(remark)
    return "\n".join([table(rows), *filter(None, map(_verdict, results))])


def _verdict(result: Result) -> str:
    """Whether the answer is right, if that is known. An expected answer of several lines starts on a new line."""
    judged = result.judged
    if judged is None:
        return ""
    if judged.checked and judged.score == 1:
        return f"{result.strategy}: right"
    expected = CONTROL.sub("\ufffd", judged.expected)
    gap = "\n" if "\n" in expected else " "
    return f"{result.strategy}: {_score_text(judged)}; expected:{gap}{expected}"


def _score_text(judged: Judged) -> str:
    if judged.why:
        return f"not judged: {judged.why}"
    if not judged.checked:
        return "not checked, since programs are not run here"
    return f"partly right, {judged.score:.2f} of 1" if judged.score else "wrong"


def table(rows: list[list[str]], left: int = 1) -> str:
    """Aligned columns, two spaces apart; the first `left` ones and the last are left-aligned, the others right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    sides = ["<" if i < left or i == len(widths) - 1 else ">" for i in range(len(widths))]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths)).rstrip() for row in rows
    )


def _remarks(results: list[Result]) -> list[str]:
    """For each lane, whether its text equals the baseline's, or where it first differs."""
    baseline = results[baseline_of(results)]
    return ["" if result is baseline else _remark(result, baseline) for result in results]


def _remark(result: Result, baseline: Result) -> str:
    if not (result.begun and baseline.begun):
        return ""
    difference = result.difference(baseline)
    return (
        f"same text as {baseline.strategy}"
        if difference is None
        else f"differs from {baseline.strategy} at token {difference.index}"
    )


def _cost(result: Result) -> list[str]:
    if not result.begun:
        return [result.strategy, *[""] * (len(COLUMNS) - 2), "failed"]
    found = result.metrics
    numbers = [
        _number(found[name], digits)
        for name, digits in (
            ("tokens", 0),
            ("seconds", 2),
            ("tokens_per_second", 1),
            ("tokens_per_target_forward", 2),
            ("acceptance_rate", 2),
            ("wasted_tokens", 0),
        )
    ]
    return [result.strategy, *numbers, result.reason.replace("_", " ")]


def _number(value: Any, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
