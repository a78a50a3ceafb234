"""Programs with holes: which parts of a program a model was least sure of, cut out until what stays is sure enough.

A program is a tree of the parts that its syntax has; a part's own text is what belongs to none of its children. Keeping
a part costs -log p of the tokens of its own text, in nats. A partial program stands for all programs that agree with
what was kept. After Khakhar, Mell and Bastani 2023; the exact solver is ours.
"""
from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from math import comb, log
from pathlib import Path
from typing import TYPE_CHECKING

from playground.errors import Refusal
from playground.trace.transcript import sequences

if TYPE_CHECKING:
    from playground.trace import Trace

HIGHEST = 10.0  # nats a part costs at most
GRID = tuple(1e-5 + (1 - 2e-5) * i / 99 for i in range(100))
"""Thresholds tau from the smallest on: what is kept may cost -log tau in all."""
WHOLE = 1.0  # threshold at which nothing is kept
HOLE = "▢"
STRANGE = frozenset("\r\f\0")  # what ends a line for some readers and not for others
CALIBRATION = Path(__file__).resolve().parents[3] / "assets" / "texts" / "calibration.json"


@dataclass
class Program:
    """Parts in the order in which each stands after its parent; part 0 is the whole. `spans` are where own text stands,
    by part.
    """

    text: str
    parents: list[int] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    @cached_property
    def children(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.parents]
        for part, parent in enumerate(self.parents[1:], 1):
            found[parent].append(part)
        return found

    def under(self, part: int) -> list[int]:
        """A part and all below it."""
        found = [part]
        for each in found:
            found += self.children[each]
        return found


def parse(text: str) -> Program | None:
    """The parts of a Python program; None where it is none. A part without text of its own is one with its parent."""
    if set(text) & STRANGE:
        return None
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    lines, program = text.split("\n"), Program(text)
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    _add(program, _Part(0, len(text), _below(module, lines, starts)), -1)
    return program


@dataclass
class _Part:
    """A stretch of the text that is a part of the syntax, before parts without a text of their own are left out."""

    start: int
    end: int
    children: list[_Part]

    def places(self, text: str) -> list[int]:
        inside = {i for child in self.children for i in range(child.start, child.end)}
        return [i for i in range(self.start, self.end) if i not in inside and not text[i].isspace()]


def _below(node: ast.AST, lines: list[str], starts: list[int]) -> list[_Part]:
    """The parts right below a node; what the syntax gives no place is left out, and its children stand for it."""
    found = []
    for child in ast.iter_child_nodes(node):
        inner = _below(child, lines, starts)
        if getattr(child, "end_col_offset", None) is None:
            found += inner
        else:
            found.append(
                _Part(
                    _place(child.lineno, child.col_offset, lines, starts),
                    _place(child.end_lineno, child.end_col_offset, lines, starts),
                    inner,
                )
            )
    return found


def _place(line: int, column: int, lines: list[str], starts: list[int]) -> int:
    """Index of a letter; the syntax tree counts columns in bytes."""
    return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())


def _add(program: Program, part: _Part, parent: int) -> None:
    places = part.places(program.text)
    own = len(program.parents)
    if places or parent < 0:
        program.parents.append(parent)
        program.own.append("".join(program.text[i] for i in places))
        program.places.append(places)
    else:
        own = parent
    for child in part.children:
        _add(program, child, own)


def price(program: Program, pieces: list[str], logprobs: list[float | None], skipped: int = 0) -> None:
    """What each part costs, from the tokens whose pieces make the text; a token that two parts touch counts for both.

    The program begins after so many `skipped` letters of the text.
    """
    token_of = [token for token, piece in enumerate(pieces) for _ in piece][skipped:]
    touched = [{token_of[i] for i in places if i < len(token_of)} for places in program.places]
    program.costs = [min(HIGHEST, -sum(logprobs[token] or 0.0 for token in tokens)) for tokens in touched]


def written(trace: Trace) -> Program | None:
    """The program a finished lane wrote, with its costs; None where its text is none."""
    found = sequences(trace.events)[0]
    program = parse(found.text.strip())
    if program:
        skipped = len(found.text) - len(found.text.lstrip())
        price(program, [token.piece for token in found.tokens], [token.logprob for token in found.tokens], skipped)
    return program


def drawn(program: Program, cut: Cut) -> str:
    """The program's text with its holes; lines of which nothing is left are left out."""
    gone = {hole: {i for part in program.under(hole) for i in program.places[part]} for hole in cut}
    lost, firsts = set().union(*gone.values()) if gone else set(), {min(places) for places in gone.values() if places}
    text = "".join(HOLE if i in firsts else "" if i in lost else letter for i, letter in enumerate(program.text))
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) or HOLE


# --- what is cut out ---

Cut = frozenset[int]
"""Parts that were removed with all below them: the holes."""


def cuts(program: Program, holes: int, grid: tuple[float, ...] = GRID) -> list[Cut]:
    """The holes at each threshold: as few parts as possible are lost, with at most so many holes, and what is lost
    stays lost.
    """
    found, cut = [], frozenset()
    total = sum(program.costs)
    for tau in grid:
        lost = [part for hole in cut for part in program.under(hole)]
        if total - sum(program.costs[part] for part in lost) > -log(tau):
            cut = _cheapest(program, holes, total + log(tau), cut)
        found.append(cut)
    return found


Table = dict[tuple[int, int], tuple[float, Cut]]
"""By number of holes and of parts lost: the most that can be saved so, in nats, and how."""


def _cheapest(program: Program, holes: int, needed: float, before: Cut) -> Cut:
    """The holes that lose the fewest parts of those that save as much as is needed and hold all that was lost before.
    """
    tables: dict[int, Table] = {}
    for part in reversed(range(len(program.parents))):
        table: Table = {} if part in before else {(0, 0): (0.0, frozenset())}
        for child in program.children[part] if table else ():
            table = _joined(table, tables.pop(child), holes)
        below = program.under(part)
        _offer(table, (1, len(below)), (sum(program.costs[each] for each in below), frozenset([part])))
        tables[part] = table
    enough = [
        (lost, -saved, number, cut) for (number, lost), (saved, cut) in tables[0].items() if saved >= needed - 1e-12
    ]
    return min(enough, key=lambda found: found[:3])[3] if enough else frozenset([0])


def _joined(left: Table, right: Table, holes: int) -> Table:
    found: Table = {}
    for (a, lost), (saved, cut) in left.items():
        for (b, more), (also, other) in right.items():
            if a + b <= holes:
                _offer(found, (a + b, lost + more), (saved + also, cut | other))
    return found


def _offer(table: Table, place: tuple[int, int], offer: tuple[float, Cut]) -> None:
    if place not in table or offer[0] > table[place][0]:
        table[place] = offer


# --- what a partial program stands for ---

def covers(program: Program, cut: Cut, truth: Program | None) -> bool:
    """Whether a program agrees with all that was kept of another one."""
    if 0 in cut:
        return True
    return truth is not None and _embeds(program, 0, cut, truth, 0)


def _embeds(program: Program, part: int, cut: Cut, truth: Program, other: int) -> bool:
    if program.own[part] != truth.own[other]:
        return False
    kept = [child for child in program.children[part] if child not in cut]
    return all(any(_embeds(program, child, cut, truth, match) for match in truth.children[other]) for child in kept)


def covered_from(program: Program | None, truth: Program | None, holes: int) -> float:
    """The smallest threshold of the grid at which the true program is among those the partial one stands for."""
    if program is None:
        return WHOLE
    return next((tau for tau, cut in zip(GRID, cuts(program, holes)) if covers(program, cut, truth)), WHOLE)


# --- calibration ---

def allowed(n: int, eps: float, delta: float) -> int | None:
    """Most misses among n that still say, with confidence 1 - delta, that at most a share eps is missed; None where n
    is too small.
    """
    total, most = 0.0, None
    for k in range(n + 1):
        total += comb(n, k) * eps ** k * (1 - eps) ** (n - k)
        if total > delta:
            return most
        most = k
    return most


def calibrated(thresholds: list[float], misses: int) -> float:
    """The smallest threshold at which at most so many true programs are missed, from where each begins to be covered.
    """
    return next((tau for tau in GRID if sum(start > tau for start in thresholds) <= misses), WHOLE)


@dataclass(frozen=True)
class Calibration:
    """Held-out programs a model was asked for: for 1, 2, ... holes the threshold from which the true one was covered.
    """

    model: str
    revision: str
    about: str
    covered_from: list[list[float]]

    @classmethod
    def read(cls, text: str) -> Calibration:
        """From JSON; raises Refusal for what is no calibration. Without a text, that which comes with the project."""
        try:
            raw = json.loads(text) if text.strip() else json.loads(CALIBRATION.read_text(encoding="utf-8"))
            rows = [[float(tau) for tau in row] for row in raw["covered_from"]]
            return cls(str(raw["model"]), str(raw["revision"]), str(raw["about"]), rows)
        except (OSError, ValueError, KeyError, TypeError):
            raise Refusal(
                "This is no calibration: make one with `python -m playground.bench.calibrate`.", "calibration"
            ) from None

    @classmethod
    def of(cls, pairs: Iterable[tuple[Trace, str]], about: str, most: int) -> Calibration:
        """From finished lanes, each with the true program, for up to `most` holes."""
        rows, header = [], None
        for trace, truth in pairs:
            program, header = written(trace), trace.headers[0]
            rows.append([covered_from(program, parse(truth), holes) for holes in range(1, most + 1)])
        if header is None:
            raise Refusal("There is no program to calibrate with: ask for one at least.", "items")
        return cls(header.model, header.revision, about, rows)

    def json(self) -> str:
        return json.dumps(asdict(self), indent=None)

    def thresholds(self, holes: int) -> list[float]:
        if not self.covered_from or any(len(row) < holes for row in self.covered_from):
            raise Refusal(
                f"This calibration does not speak of {holes} holes: take fewer, or make another one.", "holes"
            )
        return [row[holes - 1] for row in self.covered_from]
