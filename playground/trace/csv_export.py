"""Exports a run as rows, one per token, for data frames, and as CSV for spreadsheets.

The rows are the tokens of every sequence at the end of the trace; the lane's own text is sequence 0. Lanes are
numbered from 1, as on the page, sequences and positions from 0, as in the trace. The page writes the same file
(assets/scripts/run/spreadsheet.js), and a test checks that both are equal. Cells that a spreadsheet would evaluate as a
formula begin with an apostrophe. Imports neither torch nor gradio.
"""
from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import NamedTuple

from playground.events import Candidate, Commit, Forward, Header, Stamped
from playground.trace import Trace
from playground.trace.transcript import Token, Written, sequences
from playground.trace.validate import ROUNDING

COLUMNS = (
    "lane", "strategy", "sequence",
    "position",  # among the generated tokens, from 0
    "step",  # number of the commit within the lane
    "id", "text", "origin",
    "entropy", "final_entropy",  # nats, before and after masks and samplers
    "logprob",  # nats, before masks and samplers
    "probability",  # the same as a probability
    "final_probability",  # after masks and samplers, if the token is among the recorded candidates
    "rank",  # among the recorded candidates, 1 for the most probable
    "seconds",  # on the lane's clock, at the commit
    "forwards",  # forwards of the target up to then, prefill excluded
)
COLUMN_TYPES = {name: float for name in COLUMNS if name.endswith(("entropy", "logprob", "probability"))} | {
    "rank": "Int64"
}
"""The types of columns with missing values in a data frame of pandas."""
# Origins in the page's words where those of the events would mislead: greedy decoding samples nothing.
ORIGINS = {"sampled": "chosen", "redraw": "replaced"}
DIGITS = Decimal("0.000001")
ANY_FLOAT = Context(prec=330)  # digits of the largest float with six decimals
FORMULA = re.compile(r"\n*[=+\-@＝＋－＠]|[\t\r]")  # the wide signs too: spreadsheets of some languages evaluate them
SURROGATE = re.compile("[\ud800-\udfff]")
Value = int | float | str | None
NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


class CommitPoint(NamedTuple):
    """A commit: its number within the lane, its time, and the forwards of the target before it."""

    step: int
    at: float  # seconds on the lane's clock
    forwards: int  # prefill excluded


def to_csv(trace: Trace) -> str:
    """The whole file, with line endings as in RFC 4180. A lone surrogate becomes U+FFFD."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for header in trace.headers:
        writer.writerows([cell(_text(value)) for value in row] for row in rows(header, trace.lane(header.lane).events))
    return SURROGATE.sub("\ufffd", written.getvalue())


def rows(header: Header, events: list[Stamped]) -> Iterator[list[Value]]:
    """The rows of one lane, in the order of COLUMNS; None for what was not recorded."""
    commits = _commits(events)
    for number, written in sorted(sequences(events).items()):
        for position, token in enumerate(written.tokens):
            commit = commits[token.seq]
            yield [
                header.lane + 1,
                header.strategy,
                number,
                position,
                commit.step,
                token.id,
                token.piece or "",
                ORIGINS.get(token.origin or "", token.origin or ""),
                *_distribution(token, position, written),
                round(float(commit.at), 6),
                commit.forwards,
            ]


def _distribution(token: Token, position: int, written: Written) -> list[float | None]:
    """Entropies, probabilities and rank of the token; None if no logits were computed for it."""
    step = written.steps.get(position)
    rank, candidate = _ranked(token.id, step.top if step else [])
    probability = None
    if token.logprob is not None and token.logprob <= ROUNDING:  # a trace from a file may hold any number
        probability = math.exp(token.logprob)
    numbers = (
        step.entropy if step else None,
        step.final_entropy if step else None,
        token.logprob,
        probability,
        candidate.final if candidate else None,
    )
    return [*(None if number is None else float(number) for number in numbers), rank]


def _ranked(token: int, top: list[Candidate]) -> tuple[int | None, Candidate | None]:
    ranked = enumerate(top, 1)
    return next(((rank, candidate) for rank, candidate in ranked if candidate.id == token), (None, None))


def _commits(events: list[Stamped]) -> dict[int, CommitPoint]:
    """Every commit by its seq."""
    commits: dict[int, CommitPoint] = {}
    forwards = 0
    for stamped in events:
        match stamped.event:
            case Forward(stream="target", phase=phase):
                forwards += phase != "prefill"
            case Commit():
                commits[stamped.seq] = CommitPoint(len(commits), stamped.at, forwards)
    return commits


def _text(value: Value) -> str:
    """A value as the text of a cell: six decimals, halves rounded away from zero as in browsers; nothing for None."""
    if isinstance(value, float):
        return str(Decimal(value + 0.0).quantize(DIGITS, ROUND_HALF_UP, ANY_FLOAT))
    return "" if value is None else str(value)


def cell(text: str) -> str:
    """The text with an apostrophe before it where a spreadsheet would run it as a formula; plain numbers stay."""
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text
