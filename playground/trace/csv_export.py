"""A run as CSV, one row a token: what a spreadsheet or a data frame needs of a trace.

The rows are the tokens that stand at the end of the trace, of every sequence; the lane's own text is sequence 0.
Numbers are those of the trace and begin at 0. The page writes the same file (assets/live/spreadsheet.js); a test holds
them equal. Cells that a spreadsheet would take for a formula begin with an apostrophe. Imports neither torch nor
gradio.
"""
from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

from playground.events import Candidate, Commit, Forward, Header, Stamped
from playground.trace import Trace
from playground.trace.transcript import Token, Written, sequences

COLUMNS = (
    "lane", "strategy", "sequence", "position",
    "step",  # which commit of the lane wrote the token
    "id", "text", "origin",
    "entropy", "final_entropy",  # nats, of the row before and after masks and samplers
    # nats; as the model gave it; as it was drawn with, where it is among the favourites noted
    "logprob", "probability", "final_probability",
    "rank",  # among the favourites noted, 1 for the most probable
    "seconds",  # on the lane's clock, when it was committed
    "forwards",  # passes of the target until then, prefill excluded
)
DIGITS = Decimal("0.000001")
FORMULA = re.compile(r"[=+\-@\t\r]")
SURROGATE = re.compile("[\ud800-\udfff]")
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


class Act(NamedTuple):
    """A commit: its place among those of its lane, its moment, and how often the target had run."""

    step: int
    at: float
    forwards: int


def to_csv(trace: Trace) -> str:
    """The whole file, lines ending as RFC 4180 has it. A lone surrogate, which UTF-8 does not have, becomes U+FFFD as
    in a browser.
    """
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for header in trace.headers:
        writer.writerows([cell(value) for value in row] for row in _rows(header, trace.lane(header.lane).events))
    return SURROGATE.sub("\ufffd", written.getvalue())


def _rows(header: Header, events: list[Stamped]) -> Iterator[list[str]]:
    acts = _acts(events)
    for number, written in sorted(sequences(events).items()):
        for position, token in enumerate(written.tokens):
            yield [
                str(header.lane),
                header.strategy,
                str(number),
                str(position),
                *_told(token, acts[token.seq]),
                *_thought(token, position, written),
                _number(round(acts[token.seq].at, 6)),
                str(acts[token.seq].forwards),
            ]


def _told(token: Token, act: Act) -> list[str]:
    return [str(act.step), str(token.id), token.piece or "", token.origin or ""]


def _thought(token: Token, position: int, written: Written) -> list[str]:
    """What is known of the row the token was chosen from; empty where none was computed."""
    step = written.steps.get(position)
    rank, favourite = _favourite(token.id, step.top if step else [])
    probability = None if token.logprob is None else math.exp(token.logprob)
    numbers = [
        step and step.entropy,
        step and step.final_entropy,
        token.logprob,
        probability,
        favourite and favourite.final,
    ]
    return [*map(_number, numbers), rank]


def _favourite(token: int, top: list[Candidate]) -> tuple[str, Candidate | None]:
    return next(((str(rank), candidate) for rank, candidate in enumerate(top, 1) if candidate.id == token), ("", None))


def _acts(events: list[Stamped]) -> dict[int, Act]:
    """Every commit by its seq."""
    acts: dict[int, Act] = {}
    forwards = 0
    for stamped in events:
        match stamped.event:
            case Forward(stream="target", phase=phase):
                forwards += phase != "prefill"
            case Commit():
                acts[stamped.seq] = Act(len(acts), stamped.at, forwards)
    return acts


def _number(value: float | None) -> str:
    """Six decimals, a half rounded away from zero as browsers do."""
    return "" if value is None else str(Decimal(value + 0.0).quantize(DIGITS, ROUND_HALF_UP))


def cell(text: str) -> str:
    """The text with an apostrophe before it where a spreadsheet would run it as a formula; plain numbers stay."""
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text
