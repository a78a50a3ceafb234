"""Regular expressions as automata over bytes: what a lexer needs to know of a terminal, one byte after another.

Read is what grammars write: letters, escapes, classes, ".", groups without names, |, *, +, ?, {m,n}, as Python's `re`
means them, with \\d, \\w and \\s of ASCII. Looking around, anchors, flags and references are refused. Letters are
UTF-8, so a state may lie inside one.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from playground.errors import Refusal

if TYPE_CHECKING:
    from torch import Tensor

DEAD = -1
LAST = 0x10FFFF
HEX, DIGITS = frozenset("0123456789abcdefABCDEF"), frozenset("0123456789")
SURROGATES = (0xD800, 0xDFFF)  # which UTF-8 cannot write
MOST = 1000  # copies a repeat may be written out to
PIECES = 50_000  # states before they are put in order
STATES = 2000
TOO_LARGE = "A terminal of the grammar is too large to be followed byte by byte: repeat less in it."
NAMED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
SETS = {"d": [(48, 57)], "w": [(48, 57), (65, 90), (95, 95), (97, 122)], "s": [(9, 13), (32, 32)]}
Ranges = list[tuple[int, int]]


def compiled(pattern: str) -> DFA:
    """The automaton of a regular expression; every state can still come to an end. Raises Refusal."""
    reader = _PatternReader(pattern)
    try:
        start, end = reader.alternatives()
    except RecursionError:
        raise Refusal(TOO_LARGE, "source") from None
    if reader.rest:
        raise reader.refusal(f"{reader.rest[:8]!r} is out of place")
    return _determined(reader.steps, reader.silent, start, end)


@dataclass
class DFA:
    """State 0 is the start. `table[state][byte]` is the next state, DEAD where the expression has no such text."""

    table: list[list[int]]
    finals: list[bool]

    def step(self, state: int, byte: int) -> int:
        return self.table[state][byte]

    def run(self, text: bytes, state: int = 0) -> int:
        for byte in text:
            if state == DEAD:
                break
            state = self.table[state][byte]
        return state

    def matches(self, text: bytes) -> bool:
        state = self.run(text)
        return state != DEAD and self.finals[state]

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The table [states, 256] and which states are final [states]."""
        import torch  # the process that compiles does without
        return torch.tensor(self.table), torch.tensor(self.finals)


@dataclass
class _PatternReader:
    """Reads an expression into pieces of an automaton without order, each with a start and an end."""

    rest: str
    # by state: (first byte, last byte, next state)
    steps: list[list[tuple[int, int, int]]] = field(default_factory=list)
    silent: list[list[int]] = field(default_factory=list)  # by state: states one is in as well

    def refusal(self, reason: str) -> Refusal:
        return Refusal(
            f"A terminal of the grammar cannot be followed byte by byte: {reason}. Write it without.", "source"
        )

    def state(self) -> int:
        if len(self.steps) == PIECES:
            raise Refusal(TOO_LARGE, "source")
        self.steps.append([])
        self.silent.append([])
        return len(self.steps) - 1

    def alternatives(self) -> tuple[int, int]:
        start, end = self.state(), self.state()
        while True:
            first, last = self.sequence()
            self.silent[start].append(first)
            self.silent[last].append(end)
            if not self.rest.startswith("|"):
                return start, end
            self.rest = self.rest[1:]

    def sequence(self) -> tuple[int, int]:
        start = end = self.state()
        while self.rest and self.rest[0] not in "|)":
            first, last = self.repeated()
            self.silent[end].append(first)
            end = last
        return start, end

    def repeated(self) -> tuple[int, int]:
        before = self.rest
        piece = self.atom()
        text = before[:len(before) - len(self.rest)]
        while (times := self.times()) is not None:
            piece = self.copies(text, piece, *times)
            text = before[:len(before) - len(self.rest)]
        return piece

    def times(self) -> tuple[int, int | None] | None:
        """How often what was just read is repeated, (least, most); None where it is not."""
        sign = self.rest[:1]
        if sign and sign in "*+?":
            self.rest = self.rest[1:]
            found = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        elif (
            sign == "{" and (end := self.rest.find("}")) > 0 and DIGITS.issuperset(self.rest[1:end].replace(",", "", 1))
        ):
            least, comma, most = self.rest[1:end].partition(",")
            if max(len(least), len(most)) > len(str(MOST)):
                raise self.refusal(f"something is repeated more than {MOST} times")
            self.rest = self.rest[end + 1:]
            found = int(least or 0), (int(most) if most else None) if comma else int(least)
        else:
            return None
        if max(found[0], found[1] or 0) > MOST:
            raise self.refusal(f"something is repeated more than {MOST} times")
        self.rest = self.rest.removeprefix("?")  # a lazy repeat has the same texts
        return found

    def copies(self, text: str, piece: tuple[int, int], least: int, most: int | None) -> tuple[int, int]:
        """A piece so often; further copies of it are read from its text again."""
        start = end = self.state()
        for number in range(max(most if most is not None else least + (least == 0), least)):
            first, last = piece if number == 0 else self.again(text)
            if number >= least:
                self.silent[end].append(skipped := self.state())
                self.silent[end].append(first)
                self.silent[last].append(skipped)
                end, looped = skipped, (first, last)
            else:
                self.silent[end].append(first)
                end, looped = last, (first, last)
        if most is None:
            self.silent[looped[1]].append(looped[0])
        return start, end

    def again(self, text: str) -> tuple[int, int]:
        kept, self.rest = self.rest, text
        piece = self.repeated()
        self.rest = kept
        return piece

    def atom(self) -> tuple[int, int]:
        sign, self.rest = self.rest[0], self.rest[1:]
        if sign == "(":
            return self.group()
        if sign == "[":
            return self.letters(self.class_())
        if sign == ".":
            return self.letters(_others([(10, 10)]))
        if sign == "\\":
            return self.letters(self.escape())
        if sign in "*+?^$":
            raise self.refusal(f"{sign!r} is out of place")
        return self.letters([(ord(sign), ord(sign))])

    def group(self) -> tuple[int, int]:
        if self.rest.startswith("?") and not self.rest.startswith("?:"):
            raise self.refusal(f"'({self.rest[:3]}' looks around, sets flags or gives a name")
        self.rest = self.rest.removeprefix("?:")
        piece = self.alternatives()
        if not self.rest.startswith(")"):
            raise self.refusal("a bracket is not closed")
        self.rest = self.rest[1:]
        return piece

    def class_(self) -> Ranges:
        negated = self.rest.startswith("^")
        self.rest = self.rest[negated:]
        found: Ranges = []
        while not found or not self.rest.startswith("]"):
            first = self.one_of_class()
            if self.rest.startswith("-") and self.rest[1:2] != "]" and len(first) == 1:
                self.rest = self.rest[1:]
                found.append((first[0][0], self.one_of_class()[-1][1]))
            else:
                found += first
        self.rest = self.rest[1:]
        return _others(found) if negated else found

    def one_of_class(self) -> Ranges:
        if not self.rest:
            raise self.refusal("a class of letters is not closed")
        sign, self.rest = self.rest[0], self.rest[1:]
        return self.escape() if sign == "\\" else [(ord(sign), ord(sign))]

    def escape(self) -> Ranges:
        sign, self.rest = self.rest[:1], self.rest[1:]
        if sign in ("x", "u", "U"):
            length = {"x": 2, "u": 4, "U": 8}[sign]
            return [self.code(length)]
        if sign.lower() in SETS:
            return SETS[sign] if sign in SETS else _others(SETS[sign.lower()])
        if not sign or sign.isalnum() and sign not in NAMED:
            raise self.refusal(f"'\\{sign}' is not known")
        code = ord(NAMED.get(sign, sign))
        return [(code, code)]

    def code(self, length: int) -> tuple[int, int]:
        """The range of the one character whose number is the next `length` hexadecimal digits."""
        digits, self.rest = self.rest[:length], self.rest[length:]
        if len(digits) < length or not HEX.issuperset(digits) or (code := int(digits, 16)) > LAST:
            raise self.refusal(f"'{digits}' is not the number of a character")
        return code, code

    def letters(self, ranges: Ranges) -> tuple[int, int]:
        """One letter of these, as the bytes of its UTF-8."""
        start, end = self.state(), self.state()
        for low, high in ranges:
            for sequence in encoded(low, high):
                at = start
                for place, (first, last) in enumerate(sequence):
                    following = end if place + 1 == len(sequence) else self.state()
                    self.steps[at].append((first, last, following))
                    at = following
        return start, end


def _others(ranges: Ranges) -> Ranges:
    """All letters that are in none of the ranges."""
    found, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return found + ([(at, LAST)] if at <= LAST else [])


def encoded(low: int, high: int) -> list[list[tuple[int, int]]]:
    """The UTF-8 of all letters from `low` to `high`, as sequences of ranges of bytes."""
    if low > high:
        return []
    if low <= SURROGATES[1] and high >= SURROGATES[0]:
        return encoded(low, SURROGATES[0] - 1) + encoded(SURROGATES[1] + 1, high)
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            return encoded(low, last) + encoded(last + 1, high)
    for length in (1, 2, 3) if high > 0x7F else ():
        ends = (1 << 6 * length) - 1
        if low | ends != high | ends:  # they differ before the last bytes, so those have to run through
            if low & ends:
                return encoded(low, low | ends) + encoded((low | ends) + 1, high)
            if high & ends != ends:
                return encoded(low, (high & ~ends) - 1) + encoded(high & ~ends, high)
    return [list(zip(chr(low).encode(), chr(high).encode()))]


def _determined(steps: list[list[tuple[int, int, int]]], silent: list[list[int]], start: int, end: int) -> DFA:
    """One state for each set of states that can be reached, those of which no end can be reached left out."""
    first = _closed({start}, silent)
    known, table = {first: 0}, []
    for states in (order := [first]):
        if len(order) > STATES:
            raise Refusal(TOO_LARGE, "source")
        row = []
        for byte in range(256):
            target = _closed({t for s in states for low, high, t in steps[s] if low <= byte <= high}, silent)
            if target and target not in known:
                known[target] = len(order)
                order.append(target)
            row.append(known[target] if target else DEAD)
        table.append(row)
    return DFA(*_live(table, [end in states for states in order]))


def _closed(states: set[int], silent: list[list[int]]) -> frozenset[int]:
    waiting, found = list(states), set(states)
    while waiting:
        fresh = [other for other in silent[waiting.pop()] if other not in found]
        found.update(fresh)
        waiting += fresh
    return frozenset(found)


def _live(table: list[list[int]], finals: list[bool]) -> tuple[list[list[int]], list[bool]]:
    live = set(state for state, final in enumerate(finals) if final)
    while fresh := {state for state, row in enumerate(table) if state not in live and not live.isdisjoint(row)}:
        live |= fresh
    return [[following if following in live else DEAD for following in row] for row in table], finals
