"""Whether a Lark grammar has any text that its lexer can read to the end.

The terminals of llguidance's lexer match greedily. In `start: W "end"` with `W: /[a-z]+/` it reads "end" as
part of W, so a text grows up to its length limit. `unreadable` finds grammars of which no text can be read: it looks
for a text in which every terminal stops before the one after it, that is, has a whole text after which the first byte
of the next one leaves its automaton. Of grammars that it cannot read, such as those with llguidance's own directives,
it says nothing.
"""
from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from time import process_time
from typing import Any

from playground.engine.byte_dfa import DEAD, DFA, compiled
from playground.engine.greedy_lexing import bits
from playground.errors import Refusal

try:
    from lark.exceptions import LarkError
    from lark.load_grammar import load_grammar
except ImportError:  # then no grammar is checked
    load_grammar = None

UNICODE = re.compile(r"\\[dDwWsS]")  # which the automata read as ASCII, and the parser does not
SECONDS = 0.3  # CPU time; a grammar that takes longer is accepted
TERMINALS = 200
Pairs = dict[int, int]
"""By first terminal of a text, the last terminals as bits."""


class _OutOfTime(Exception):
    pass


def unreadable(source: str) -> str | None:
    """Why the lexer never finishes; None if it does, or if that is unknown."""
    if load_grammar is None:
        return None
    try:
        grammar, _ = load_grammar(_plain(source), "the grammar", [], False)
        terminals, rules, ignored = grammar.compile(["start"], "*")
        return _Grammar(terminals, rules, ignored).reason() if len(terminals) <= TERMINALS else None
    except (LarkError, _OutOfTime, RecursionError, ValueError, TypeError, AttributeError):
        return None


def _plain(source: str) -> str:
    return "\n".join(line for line in source.splitlines() if not line.startswith("%llguidance"))


class _Grammar:
    """Terminals by number, what may stand before each, and rules as lists of symbols."""

    def __init__(self, terminals: list[Any], rules: list[Any], ignored: list[str]):
        self.deadline = process_time() + SECONDS
        self.names = [terminal.name for terminal in terminals]
        self.shown = [_shown(terminal) for terminal in terminals]
        automata = [self._automaton(terminal) for terminal in terminals]
        self.before = self._separable(automata, _union(1 << self.names.index(name) for name in ignored))
        self.empty = {name for name, automaton in zip(self.names, automata) if automaton and automaton.finals[0]}
        self.rules = [(str(rule.origin.name), [str(symbol.name) for symbol in rule.expansion]) for rule in rules]
        self.swallowed: tuple[int, int] | None = None  # a terminal, and the first one that it never stops before

    def reason(self) -> str | None:
        if self._has_a_text():
            return None
        if self.swallowed is None:
            return "no finite text satisfies it"
        first, second = (self.shown[number] for number in self.swallowed)
        return (
            f"no text of it can be completed: a terminal is read as far as it goes, so {first} never stops before"
            f" {second}, which has to follow it. Let {first} exclude what {second} begins with, or use gbnf or regex,"
            " which read character by character"
        )

    def _automaton(self, terminal: Any) -> DFA | None:
        """None if it cannot be built, so that nothing is known about the terminal."""
        if process_time() > self.deadline:
            raise _OutOfTime
        if UNICODE.search(terminal.pattern.to_regexp()):
            return None
        try:
            return compiled(terminal.pattern.to_regexp())
        except Refusal:
            return None

    def _separable(self, automata: list[DFA | None], ignored: int) -> list[int]:
        """For each terminal those that it may stand behind, with ignored ones between them."""
        firsts = [_firsts(automaton) for automaton in automata]
        stops = [_stops(automaton) for automaton in automata]
        before = [_union(1 << a for a, stop in enumerate(stops) if stop & first) for first in firsts]
        for _ in range(ignored.bit_count()):
            before = [reach | _union(before[i] for i in bits(reach & ignored)) for reach in before]
        return before

    def _has_a_text(self) -> bool:
        known: dict[str, Pairs] = defaultdict(dict)
        empty, grown = set(self.empty), True
        for number, name in enumerate(self.names):
            known[name] = {number: 1 << number}
        while grown:
            grown = False
            for name, symbols in self.rules:
                grown |= _merge(known[name], self._texts(symbols, known, empty))
                if name not in empty and empty.issuperset(symbols):
                    grown = bool(empty.add(name) or True)
        return bool(known["start"]) or "start" in empty

    def _texts(self, symbols: list[str], known: dict[str, Pairs], empty: set[str]) -> Pairs:
        found, maybe_nothing = {}, True
        for symbol in symbols:
            if process_time() > self.deadline:
                raise _OutOfTime
            grown = self._joined(found, known[symbol])
            if symbol in empty:
                _merge(grown, found)
            if maybe_nothing:
                _merge(grown, known[symbol])
            found, maybe_nothing = grown, maybe_nothing and symbol in empty
        return found

    def _joined(self, left: Pairs, right: Pairs) -> Pairs:
        found: Pairs = defaultdict(int)
        for first, lasts in left.items():
            for following, ends in right.items():
                if lasts & self.before[following]:
                    found[first] |= ends
                elif self.swallowed is None:
                    self.swallowed = bits(lasts)[0], following
        return dict(found)


def _merge(into: Pairs, more: Pairs) -> bool:
    """Add pairs; whether there were new ones."""
    grown = False
    for first, lasts in more.items():
        if lasts & ~into.get(first, 0):
            into[first] = into.get(first, 0) | lasts
            grown = True
    return grown


def _firsts(automaton: DFA | None) -> int:
    """Bytes a terminal may begin with, as bits."""
    if automaton is None:
        return (1 << 256) - 1
    return _union(1 << byte for byte, state in enumerate(automaton.table[0]) if state != DEAD)


def _stops(automaton: DFA | None) -> int:
    """Bytes that end a whole text of a terminal, as bits."""
    if automaton is None:
        return (1 << 256) - 1
    rows = [row for row, final in zip(automaton.table, automaton.finals) if final]
    return _union(1 << byte for row in rows for byte, state in enumerate(row) if state == DEAD)


def _shown(terminal: Any) -> str:
    literal = type(terminal.pattern).__name__ == "PatternStr"
    return f'"{terminal.pattern.value}"' if literal else terminal.name


def _union(sets: Iterable[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found
