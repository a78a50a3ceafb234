"""Partial programs: programs with holes in place of the parts that the model was least confident in.

A program is a tree of syntactic parts; a part's own text is what belongs to none of its children. Keeping a part costs
-log p of the tokens of its own text, in nats. A partial program represents all programs that agree with the parts kept.
After Khakhar, Mell and Bastani 2023; the exact solver is ours.
"""
from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from math import comb, log
from typing import TYPE_CHECKING

from playground.algorithms.programs.confined.policy import CHARACTERS
from playground.asset_files import ASSETS
from playground.errors import Refusal
from playground.trace.transcript import sequences

if TYPE_CHECKING:
    from playground.trace import Trace

HIGHEST = 10.0  # upper limit of the cost of a part, in nats
GRID = tuple(1e-5 + (1 - 2e-5) * i / 99 for i in range(100))
"""Thresholds tau in ascending order: the parts kept may cost -log tau in total."""
WHOLE = 1.0  # threshold at which nothing is kept
HOLE = "▢"
STRANGE = frozenset("\r\f\0")  # characters that end a line for some parsers only
CALIBRATION = ASSETS / "texts" / "calibration.json"


@dataclass
class Program:
    """Parts of a program, each after its parent; part 0 is the whole program.

    By part: `parents` its parent, -1 for part 0; `own` its own text; `places` the indices of its own characters;
    `costs` its cost in nats.
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
        """A part and all its descendants."""
        found = [part]
        for each in found:
            found += self.children[each]
        return found


def parse(text: str) -> Program | None:
    """The parts of a Python program; None if the text is not one, or too long or nested too deeply. A part without own
    text is merged with its parent.
    """
    if len(text) > CHARACTERS or set(text) & STRANGE:
        return None
    lines, program = text.split("\n"), Program(text)
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    try:
        _add(program, _Part(0, len(text), _below(ast.parse(text), lines, starts)), -1)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return program


@dataclass
class _Part:
    """A span of the text for a syntax node, before parts without own text are merged."""

    start: int
    end: int
    children: list[_Part]

    def places(self, text: str) -> list[int]:
        """Indices of its own characters, those outside its children."""
        own, at = [], self.start
        for child in sorted(self.children, key=lambda child: child.start):
            own += range(at, child.start)
            at = max(at, child.end)
        return [i for i in (*own, *range(at, self.end)) if not text[i].isspace()]


def _below(node: ast.AST, lines: list[str], starts: list[int]) -> list[_Part]:
    """The child parts of a node. A child without a position is replaced by its own children."""
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
    """Index of a character; the syntax tree counts columns in bytes."""
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
    """Set the cost of each part from the tokens of the text; a token that overlaps two parts counts for both.

    The program begins after the first `skipped` characters of the text.
    """
    token_of = [token for token, piece in enumerate(pieces) for _ in piece][skipped:]
    touched = [{token_of[i] for i in places if i < len(token_of)} for places in program.places]
    program.costs = [min(HIGHEST, -sum(logprobs[token] or 0.0 for token in tokens)) for tokens in touched]


def written(trace: Trace) -> Program | None:
    """The program that a finished lane wrote, with its costs; None if its text is not a program."""
    found = sequences(trace.events)[0]
    program = parse(found.text.strip())
    if program:
        skipped = len(found.text) - len(found.text.lstrip())
        price(program, [token.piece for token in found.tokens], [token.logprob for token in found.tokens], skipped)
    return program


def drawn(program: Program, cut: Cut) -> str:
    """The program's text with its holes, without lines that are empty."""
    removed = {hole: {i for part in program.under(hole) for i in program.places[part]} for hole in cut}
    lost = set().union(*removed.values()) if removed else set()
    firsts = {min(places) for places in removed.values() if places}
    text = "".join(HOLE if i in firsts else "" if i in lost else letter for i, letter in enumerate(program.text))
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) or HOLE


# --- choosing the holes ---

Cut = frozenset[int]
"""The holes: parts that are removed with all their descendants."""


def cuts(program: Program, holes: int, grid: tuple[float, ...] = GRID) -> list[Cut]:
    """The cut at each threshold of an ascending `grid`, with at most `holes` holes and as few parts lost as possible.

    Parts lost at one threshold stay lost at all larger ones.
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
"""By (number of holes, number of parts lost): the largest reduction of the cost, in nats, and the cut that gives it."""


def _cheapest(program: Program, holes: int, needed: float, before: Cut) -> Cut:
    """The cut with the fewest parts lost that saves at least `needed` nats and contains all parts lost `before`."""
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


# --- the set of programs that a partial program represents ---

def covers(program: Program, cut: Cut, truth: Program | None) -> bool:
    """Whether the program `truth` agrees with all parts kept of another one."""
    if 0 in cut:
        return True
    return truth is not None and _embeds(program, 0, cut, truth, 0)


def _embeds(program: Program, part: int, cut: Cut, truth: Program, other: int) -> bool:
    if program.own[part] != truth.own[other]:
        return False
    kept = [child for child in program.children[part] if child not in cut]
    return all(any(_embeds(program, child, cut, truth, match) for match in truth.children[other]) for child in kept)


def covered_from(program: Program | None, truth: Program | None, holes: int) -> float:
    """The smallest threshold of the grid at which the partial program covers the true one."""
    if program is None:
        return WHOLE
    return next((tau for tau, cut in zip(GRID, cuts(program, holes)) if covers(program, cut, truth)), WHOLE)


# --- calibration ---

def allowed(n: int, eps: float, delta: float) -> int | None:
    """Largest number of misses among n from which a miss rate of at most eps follows with confidence 1 - delta.

    None if n is too small.
    """
    total, most = 0.0, None
    for k in range(n + 1):
        total += comb(n, k) * eps ** k * (1 - eps) ** (n - k)
        if total > delta:
            return most
        most = k
    return most


def calibrated(thresholds: list[float], misses: int) -> float:
    """The smallest threshold at which at most `misses` true programs are missed.

    `thresholds` are those from which each true program is covered.
    """
    return next((tau for tau in GRID if sum(start > tau for start in thresholds) <= misses), WHOLE)


@dataclass(frozen=True)
class Calibration:
    """Calibration set of held-out programs: by program, the thresholds at which it is covered by 1, 2, ... holes."""

    model: str
    revision: str
    about: str
    covered_from: list[list[float]]

    @classmethod
    def read(cls, text: str) -> Calibration:
        """Parse JSON; an empty text gives the bundled calibration. Raises Refusal if the text is not a calibration."""
        try:
            raw = json.loads(text) if text.strip() else json.loads(CALIBRATION.read_text(encoding="utf-8"))
            rows = [[float(tau) for tau in row] for row in raw["covered_from"]]
            return cls(str(raw["model"]), str(raw["revision"]), str(raw["about"]), rows)
        except (OSError, ValueError, KeyError, TypeError):
            raise Refusal(
                "This is not a calibration: make one with `python tools/calibrate.py`.", "calibration"
            ) from None

    @classmethod
    def of(cls, pairs: Iterable[tuple[Trace, str]], about: str, most: int) -> Calibration:
        """Calibration from finished lanes, each with the true program, for up to `most` holes."""
        rows, header = [], None
        for trace, truth in pairs:
            program, header = written(trace), trace.headers[0]
            rows.append([covered_from(program, parse(truth), holes) for holes in range(1, most + 1)])
        if header is None:
            raise Refusal("There is no program to calibrate with: request at least one.", "items")
        return cls(header.model, header.revision, about, rows)

    def json(self) -> str:
        return json.dumps(asdict(self), indent=None)

    def thresholds(self, holes: int) -> list[float]:
        if not self.covered_from or any(len(row) < holes for row in self.covered_from):
            raise Refusal(
                f"This calibration does not cover {holes} holes: choose fewer, or make another one.", "holes"
            )
        return [row[holes - 1] for row in self.covered_from]
