"""Programs with meaningful names and the same ones with names of one letter: pairs that differ in quality alone."""
from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

# of the names that programs of the small world give to loop variables
MEANING = {"x": "item", "i": "index", "w": "word"}
NAME = re.compile(r"\b[xiw]\b")
DOCSTRING = re.compile(r'"""')


def with_meaningful_names(program: str) -> str:
    """The program with the names of loop variables written out, which computes the same; unchanged if one of the new
    names is taken. Lines with a docstring stay as they are.
    """
    if any(re.search(rf"\b{name}\b", program) for name in MEANING.values()):
        return program
    return "\n".join(line if DOCSTRING.search(line) else NAME.sub(lambda found: MEANING[found[0]], line)
                     for line in program.split("\n"))


def short_names(program: str) -> int:
    """How many names of one letter a program has, those in docstrings left out."""
    lines = [line for line in program.split("\n") if not DOCSTRING.search(line)]
    return sum(len(re.findall(r"\b[a-z]\b", line)) for line in lines)


def changed_lines(one: Sequence[str], other: Sequence[str]) -> tuple[set[int], set[int]]:
    """Which lines of two texts differ, by their numbers in each."""
    found: tuple[set[int], set[int]] = set(), set()
    for kind, first, last, start, stop in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind != "equal":
            found[0].update(range(first, last))
            found[1].update(range(start, stop))
    return found


def in_lines(pieces: Sequence[str], lines: set[int]) -> list[bool]:
    """Which tokens, by their texts, begin in one of these lines of the text that they make up."""
    found, line = [], 0
    for piece in pieces:
        found.append(line in lines)
        line += piece.count("\n")
    return found
