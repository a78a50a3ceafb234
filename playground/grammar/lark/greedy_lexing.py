"""Finds the parts of a grammar that a greedy lexer may read as one terminal.

The parser of llguidance has a lexer whose terminals match greedily. A grammar without a lexer means the
same with terminals that never swallow what follows them: after a terminal A that is complete, no terminal that was
possible in its place goes on with a character that may follow A. `terminals` finds the largest such parts. It begins
with the largest parts that do not lead back to themselves, and takes apart what swallows; single characters swallow
nothing. Which terminals are possible at one place, and repeats, are overestimated, so a part may be taken apart
needlessly but never wrongly left whole.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from playground.grammar.lark.gbnf_expressions import ROOT, Alt, Chars, Expression, Ref, Repeat, Seq, parts_of

POSITIONS = 500  # of one terminal; a larger one is taken apart
Rules = dict[str, Expression]


class Ends(NamedTuple):
    """What an expression may begin and end with, as sets of bits, and whether it may be empty."""

    empty: bool
    first: int
    last: int


class TooLarge(Exception):
    pass


class Links:
    """What may follow what among the leaves of an expression; `leaf` gives the ends of a node that is not entered."""

    def __init__(self, leaf: Callable[[Expression], Ends | None]):
        self.leaf = leaf
        self.after: dict[int, int] = defaultdict(int)

    def ends(self, expression: Expression) -> Ends:
        if (known := self.leaf(expression)) is not None:
            return known
        match expression:
            case Seq(parts):
                return self._sequence(parts)
            case Alt(parts):
                each = [self.ends(part) for part in parts]
                return Ends(any(e.empty for e in each), _union(e.first for e in each), _union(e.last for e in each))
            case Repeat(part, least, most):
                found = self.ends(part)
                if most != 1:
                    self._join(found.last, found.first)
                return Ends(found.empty or least == 0, found.first, found.last)
        raise TypeError(type(expression).__name__)

    def _sequence(self, parts: tuple[Expression, ...]) -> Ends:
        empty, first, last = Ends(True, 0, 0)
        for part in parts:
            found = self.ends(part)
            self._join(last, found.first)
            first |= found.first if empty else 0
            last = found.last | (last if found.empty else 0)
            empty = empty and found.empty
        return Ends(empty, first, last)

    def _join(self, before: int, following: int) -> None:
        for bit in bits(before):
            self.after[bit] |= following


@dataclass
class Terminal:
    """The positions of a terminal's characters: the characters of each, where it begins and ends, and what follows."""

    characters: list[int]
    ends: Ends
    after: dict[int, int]

    @property
    def first(self) -> int:
        """Characters it may begin with."""
        return self.of(self.ends.first)

    def of(self, positions: int) -> int:
        """The characters of a set of positions."""
        return _union(self.characters[position] for position in bits(positions))


def terminals(rules: Rules) -> set[Expression]:
    """The parts of the rules that may be terminals; everything else is made of them by rules."""
    alphabet, regular = _alphabet(rules), _regular(rules)
    chosen: set[Expression] = set()
    seen: set[str] = set()
    _choose(rules[ROOT], rules, regular, chosen, seen)
    while swallowing := _swallowing(rules, chosen, alphabet):
        chosen -= swallowing
        for expression in swallowing:
            for part in parts_of(expression):
                _choose(part, rules, regular, chosen, seen)
    return chosen


def _choose(expression: Expression, rules: Rules, regular: set[str], chosen: set[Expression], seen: set[str]) -> None:
    """Add the largest parts of an expression that lead to no rule that leads back to itself."""
    if isinstance(expression, Ref):
        if expression.name not in seen:
            seen.add(expression.name)
            _choose(rules[expression.name], rules, regular, chosen, seen)
    elif _names(expression) <= regular:
        chosen.add(expression)
    else:
        for part in parts_of(expression):
            _choose(part, rules, regular, chosen, seen)


def _regular(rules: Rules) -> set[str]:
    """Rules that do not lead to one that leads back to itself."""
    names = {name: _names(expression) for name, expression in reversed(rules.items())}
    found: set[str] = set()
    before = -1
    while len(found) > before:
        before = len(found)
        for name, inner in names.items():
            if inner <= found:
                found.add(name)
    return found


def _names(expression: Expression) -> set[str]:
    if isinstance(expression, Ref):
        return {expression.name}
    return set().union(*map(_names, parts_of(expression)))


def _alphabet(rules: Rules) -> Callable[[Chars], int]:
    """Sets of characters as bits: one for each stretch of characters that no range of the grammar divides."""
    everything = [part for expression in rules.values() for part in _walk(expression) if isinstance(part, Chars)]
    edges = sorted({edge for part in everything for low, high in part.ranges for edge in (low, high + 1)})
    place = {edge: i for i, edge in enumerate(edges)}
    return lambda part: _union((1 << place[high + 1]) - (1 << place[low]) for low, high in part.ranges)


def _walk(expression: Expression) -> Iterator[Expression]:
    yield expression
    for part in parts_of(expression):
        yield from _walk(part)


def _swallowing(rules: Rules, chosen: set[Expression], alphabet: Callable[[Chars], int]) -> set[Expression]:
    """Terminals that may continue where another one, or they themselves, should have ended."""
    ordered, read, found = list(chosen), {}, set()
    for expression in ordered:
        try:
            read[expression] = _terminal(expression, rules, alphabet)
        except TooLarge:
            found.add(expression)
    return found or _conflicts(ordered, read, rules)


def _terminal(expression: Expression, rules: Rules, alphabet: Callable[[Chars], int]) -> Terminal:
    characters: list[int] = []

    def leaf(part: Expression) -> Ends | None:
        if isinstance(part, Ref):
            return links.ends(rules[part.name])
        if not isinstance(part, Chars):
            return None
        if len(characters) == POSITIONS:
            raise TooLarge
        characters.append(alphabet(part))
        return Ends(False, 1 << len(characters) - 1, 1 << len(characters) - 1)

    links = Links(leaf)
    return Terminal(characters, links.ends(expression), links.after)


def _conflicts(ordered: list[Expression], read: dict[Expression, Terminal], rules: Rules) -> set[Expression]:
    start, after = _neighbours(ordered, read, rules)
    together: dict[int, int] = defaultdict(int)
    for place in {start, *after.values()}:
        for number in bits(place):
            together[number] |= place
    found = set()
    for number, others in together.items():
        ended = read[ordered[number]]
        following = _union(read[ordered[other]].first for other in bits(after[number]))
        found |= {
            ordered[other] for other in bits(others) if _swallows(ended, read[ordered[other]], following)
        }
    return found


def _neighbours(
    ordered: list[Expression], read: dict[Expression, Terminal], rules: Rules
) -> tuple[int, dict[int, int]]:
    """Terminals that may begin a text, and those that may follow each."""
    numbers, known = {expression: i for i, expression in enumerate(ordered)}, dict.fromkeys(rules, Ends(False, 0, 0))
    before = None

    def leaf(part: Expression) -> Ends | None:
        if part in numbers:
            return Ends(read[part].ends.empty, 1 << numbers[part], 1 << numbers[part])
        return known[part.name] if isinstance(part, Ref) else None

    links = Links(leaf)
    reached = [name for name in reversed(rules) if name in _reached(rules, numbers)]
    while known != before:
        before = known.copy()
        for name in reached:
            known[name] = links.ends(rules[name])
    return known[ROOT].first, links.after


def _reached(rules: Rules, terminals: dict[Expression, int]) -> set[str]:
    """Rules that are not only read inside of terminals."""
    reached, waiting = {ROOT}, [rules[ROOT]]
    while waiting:
        expression = waiting.pop()
        if isinstance(expression, Ref) and expression.name not in reached:
            reached.add(expression.name)
            waiting.append(rules[expression.name])
        elif expression not in terminals:
            waiting += parts_of(expression)
    return reached


def _swallows(ended: Terminal, other: Terminal, following: int) -> bool:
    """Whether there is a text of `ended`, and a character that may follow it, that `other` begins with."""
    waiting = seen = set(product(bits(ended.ends.first), bits(other.ends.first)))
    while waiting:
        waiting = {pair for pair in waiting if ended.characters[pair[0]] & other.characters[pair[1]]}
        if any(
            ended.ends.last >> mine & 1 and other.of(other.after[theirs]) & following for mine, theirs in waiting
        ):
            return True
        reached = {
            pair for mine, theirs in waiting for pair in product(bits(ended.after[mine]), bits(other.after[theirs]))
        }
        waiting = reached - seen
        seen = seen | waiting
    return False


def bits(number: int) -> list[int]:
    """Indices of the set bits of a number."""
    found = []
    while number:
        lowest = number & -number
        found.append(lowest.bit_length() - 1)
        number ^= lowest
    return found


def _union(sets) -> int:
    found = 0
    for one in sets:
        found |= one
    return found
