"""Puzzles and sentences with known answers, for filling in parallel: the answers that several words agree on.

After the sudokus, the sentences from words and the paraphrases of ParallelBench, Kang et al. 2025, arXiv 2510.04767.
Its own texts are judged by a grammar checker and by models; here a small grammar lists every right answer.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from random import Random

BLANK, SIDE, BOX = "blank", 4, 2
GIVEN = 12  # cells of a sudoku that are given
NOUNS = {"cat": "cats", "dog": "dogs", "bird": "birds"}
VERBS = {"sleeps": "sleep", "runs": "run", "sings": "sing"}
PLACES = ("here", "there", "outside")
REWORDED = {"sees": ("seen", "looks at"), "calls": ("called", "shouts to")}  # participle, and other words for it
Answer = tuple[str, ...]


def solutions(cells: Sequence[str]) -> Iterator[Answer]:
    """The words for the blanks of a sudoku of 4 x 4 cells, in reading order, of every solution.

    There is none unless exactly four words are given.
    """
    symbols = sorted(set(cells) - {BLANK})
    if len(cells) == SIDE * SIDE and len(symbols) == SIDE:
        blanks = [place for place, cell in enumerate(cells) if cell == BLANK]
        for grid in _filled(list(cells), blanks, symbols):
            yield tuple(grid[place] for place in blanks)


def _filled(grid: list[str], blanks: list[int], symbols: list[str]) -> Iterator[list[str]]:
    """All ways to fill the blanks so that no row, column or box repeats a word; `grid` is changed meanwhile."""
    if not blanks:
        if not any(_repeats(grid, place) for place in range(len(grid))):  # given words may
            yield grid
        return
    place, *rest = blanks
    for grid[place] in symbols:
        if not _repeats(grid, place):
            yield from _filled(grid, rest, symbols)
    grid[place] = BLANK


def _repeats(grid: list[str], place: int) -> bool:
    """Whether another cell of the same row, column or box holds the same word."""
    row, column = divmod(place, SIDE)
    return any(
        grid[other] == grid[place] and other != place and (
            other // SIDE == row or other % SIDE == column
            or (other // SIDE // BOX, other % SIDE // BOX) == (row // BOX, column // BOX)
        )
        for other in range(SIDE * SIDE)
    )


def sudoku(chance: Random, names: Sequence[str]) -> list[str]:
    """The cells of a random sudoku with one solution."""
    symbols = chance.sample(names, SIDE)
    rows = chance.choice([[*first, *second] for first in permutations([0, 1]) for second in permutations([2, 3])])
    solved = [symbols[(column + BOX * (row % BOX) + row // BOX) % SIDE] for row in rows for column in range(SIDE)]
    while True:
        hidden = set(chance.sample(range(SIDE * SIDE), SIDE * SIDE - GIVEN))
        cells = [BLANK if place in hidden else word for place, word in enumerate(solved)]
        if len(list(solutions(cells))) == 1:
            return cells


def sentences(noun: str, place: str) -> list[Answer]:
    """The sentences with a noun and a place whose number words, nouns and verbs agree."""
    if noun not in NOUNS or place not in PLACES:
        return []
    return [
        answer for one, many in VERBS.items()
        for answer in (("one", noun, one, place), ("two", NOUNS[noun], many, place))
    ]


def rewordings(who: str, verb: str, whom: str) -> list[Answer]:
    """Other sentences for "who sees whom"."""
    if verb not in REWORDED:
        return []
    participle, others = REWORDED[verb]
    return [(whom, "is", participle, "by", who), (who, *others.split(), whom), ("it", "is", whom, "that", who, verb)]
