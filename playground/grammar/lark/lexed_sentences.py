"""Whether a Lark grammar has any text that its lexer can read to the end.

The terminals of llguidance's lexer match greedily. In `start: W "end"` with `W: /[a-z]+/` it reads "end" as
part of W, so a text grows up to its length limit. `unreadable` finds grammars of which no text can be read: it looks
for a text in which every terminal stops before the one after it, that is, has a whole text after which the first byte
of the next one leaves its automaton. It also finds traps, as in `start: "x" | W "end"`: terminals that a text can reach
and no complete one contains, where some byte begins no other terminal. Terminals that complete texts may contain are
overestimated, so a trap may be missed. Of grammars that it cannot read, such as those with llguidance's own directives,
it says nothing.
"""
from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from time import process_time
from typing import Any

from playground.errors import Refusal
from playground.grammar.lark.byte_dfa import DEAD, DFA, compiled
from playground.grammar.lark.greedy_lexing import bits

try:
    from lark.exceptions import LarkError
    from lark.load_grammar import load_grammar
except ImportError:  # then no grammar is checked
    load_grammar = None  # type: ignore[assignment]

UNICODE = re.compile(r"\\[dDwWsS]")  # which the automata read as ASCII, and the parser does not
SECONDS = 0.3  # CPU time; a grammar that takes longer is accepted
TERMINALS = 200
FOLLOWED = "followed_by_the_end"  # a rule added to a grammar
Pairs = dict[int, int]
"""By first terminal of a text, the last terminals as bits."""


class _OutOfTime(Exception):
    pass


def unreadable(source: str, end: str = "") -> str | None:
    """Why the lexer never finishes a text that has `end` behind it; None if it does, or if that is unknown."""
    if load_grammar is None:
        return None
    start = FOLLOWED if end else "start"
    rule = f"\n{FOLLOWED}: start {json.dumps(end, ensure_ascii=False)}" if end else ""
    try:
        grammar, _ = load_grammar(_plain(source) + rule, "the grammar", [], False)
        terminals, rules, ignored = grammar.compile([start], "*")
        return _Grammar(start, terminals, rules, ignored).reason() if len(terminals) <= TERMINALS else None
    except (LarkError, _OutOfTime, RecursionError, ValueError, TypeError, AttributeError):
        return None


def _plain(source: str) -> str:
    return "\n".join(line for line in source.splitlines() if not line.startswith("%llguidance"))


class _Grammar:
    """Terminals by number, what may precede each, and rules as lists of symbols."""

    def __init__(self, start: str, terminals: list[Any], rules: list[Any], ignored: list[str]):
        self.start, self.deadline = start, process_time() + SECONDS
        self.names = [terminal.name for terminal in terminals]
        self.shown = [_shown(terminal) for terminal in terminals]
        automata = [self._automaton(terminal) for terminal in terminals]
        self.firsts = [_firsts(automaton) for automaton in automata]
        self.read = _union(1 << number for number, automaton in enumerate(automata) if automaton)
        self.ignored = _union(1 << self.names.index(name) for name in ignored)
        self.before = self._separable(automata)
        self.empty = {name for name, automaton in zip(self.names, automata) if automaton and automaton.finals[0]}
        self.rules = [(str(rule.origin.name), [str(symbol.name) for symbol in rule.expansion]) for rule in rules]
        self.swallowed: tuple[int, int] | None = None  # a terminal, and the first one that it never stops before
        self.known: dict[str, Pairs] = defaultdict(dict)  # of the readable texts of each symbol

    def reason(self) -> str | None:
        if not self._has_a_text():
            return self._swallowing("no text of it can be completed") or "no finite text satisfies it"
        trap = self._trap()
        if trap is None:
            return None
        what = f"a text that goes on with {self.shown[trap]} can never be completed"
        return self._swallowing(what) or what

    def _swallowing(self, what: str) -> str | None:
        """What is wrong, and the terminal that swallows another; None if none does."""
        if self.swallowed is None:
            return None
        first, second = (self.shown[number] for number in self.swallowed)
        return (
            f"{what}: a terminal is read as far as it goes, so {first} never stops before"
            f" {second}, which has to follow it. Let {first} exclude what {second} begins with, or use gbnf or regex,"
            " which read character by character"
        )

    def _trap(self) -> int | None:
        """A terminal that a text can reach, that no complete text contains, and that some byte alone leads to."""
        living = self._living() | self.ignored
        covered = _union(self.firsts[terminal] for terminal in bits(living))
        for terminal in bits(self._reached() & self.read & ~living):
            if self.firsts[terminal] & ~covered:
                self.swallowed = self._swallowed_after(terminal)
                return terminal
        return None

    def _living(self) -> int:
        """Terminals of all rules that have a readable text and are reached through such rules, as bits."""
        rules = [(name, symbols) for name, symbols in self.rules if self._is_readable(symbols)]
        found, grown = {self.start}, True
        while grown:
            more = {symbol for name, symbols in rules if name in found for symbol in symbols}
            grown, found = not more <= found, found | more
        return _union(1 << number for number, name in enumerate(self.names) if name in found)

    def _is_readable(self, symbols: list[str]) -> bool:
        return bool(self._texts(symbols, self.known, self.empty)) or self.empty.issuperset(symbols)

    def _reached(self) -> int:
        """Terminals that may come next after some beginning of a text, completed or not, as bits."""
        start = 1 << len(self.names)  # represents the terminal before the text
        context, found, grown = defaultdict(int, {self.start: start}), 0, True
        while grown:
            grown = False
            for name, symbols in self.rules:
                for symbol, before in self._contexts(symbols, context[name], start):
                    grown |= bool(before & ~context[symbol])
                    context[symbol] |= before
        for number, name in enumerate(self.names):
            found |= 1 << number if context[name] & (self.before[number] | start) else 0
        return found

    def _contexts(self, symbols: list[str], context: int, start: int) -> Iterator[tuple[str, int]]:
        """Each symbol of a rule with the terminals that may precede it, where the rule begins after `context`."""
        for symbol in symbols:
            if not context:
                return
            if process_time() > self.deadline:
                raise _OutOfTime
            yield symbol, context
            lasts = _union(ends for first, ends in self.known[symbol].items() if context & (self.before[first] | start))
            context = lasts | (context if symbol in self.empty else 0)

    def _swallowed_after(self, terminal: int) -> tuple[int, int] | None:
        """The terminals in a rule with this one that cannot follow each other."""
        for _, symbols in self.rules:
            if self.names[terminal] in symbols and not self._is_readable(symbols):
                self.swallowed = None
                self._texts(symbols, self.known, self.empty)
                if self.swallowed:
                    return self.swallowed
        return None

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

    def _separable(self, automata: list[DFA | None]) -> list[int]:
        """For each terminal those that it may follow, with ignored ones between them."""
        stops = [_stops(automaton) for automaton in automata]
        before = [_union(1 << a for a, stop in enumerate(stops) if stop & first) for first in self.firsts]
        for _ in range(self.ignored.bit_count()):
            before = [reach | _union(before[i] for i in bits(reach & self.ignored)) for reach in before]
        return before

    def _has_a_text(self) -> bool:
        known, empty, grown = self.known, self.empty, True
        for number, name in enumerate(self.names):
            known[name] = {number: 1 << number}
        while grown:
            grown = False
            for name, symbols in self.rules:
                grown |= _merge(known[name], self._texts(symbols, known, empty))
                if name not in empty and empty.issuperset(symbols):
                    empty.add(name)
                    grown = True
        return bool(known[self.start]) or self.start in empty

    def _texts(self, symbols: list[str], known: dict[str, Pairs], empty: set[str]) -> Pairs:
        found: Pairs = {}
        maybe_nothing = True
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
