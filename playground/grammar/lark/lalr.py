"""A LALR(1) grammar as plain tables, and a parser that follows them one terminal at a time.

`tables` reads a grammar with the library lark and is called where its time and memory are limited, in the compiler
process; `Parser` needs neither lark nor the source. Terminals come as automata over bytes. Imports no torch.
"""
from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

from playground.errors import Refusal
from playground.grammar import limits
from playground.grammar.lark.byte_dfa import DFA, compiled
from playground.grammar.lark.productive_rules import endless, rules_of_lark

try:
    from lark import Lark
    from lark.exceptions import LarkError
    from lark.lexer import Lexer
except ImportError:  # which syncode says; the other constraints do without
    pass

END = "$END"
SHIFT, REDUCE = 0, 1
BYTES = 256
Actions = dict[str, tuple[int, int]]
"""By symbol: (SHIFT, next state) or (REDUCE, rule)."""


@dataclass(frozen=True)
class Table:
    """A parse table: actions by state, rules as (symbol, length of its expansion), the first state and the last."""

    actions: list[Actions]
    rules: list[tuple[str, int]]
    first: int
    last: int


@dataclass(frozen=True)
class Parser:
    """A parser after some terminals: its stack of states. It never changes; `fed` is the next one."""

    table: Table
    stack: tuple[int, ...]

    def accepts(self) -> set[str]:
        """Terminals that may come next, END where the text may end here."""
        return {
            symbol for symbol in self.table.actions[self.stack[-1]] if symbol.isupper() and self.fed(symbol) is not None
        }

    def fed(self, terminal: str) -> Parser | None:
        """The parser after one terminal more, or after the end; None where it may not come."""
        stack = list(self.stack)
        while (found := self.table.actions[stack[-1]].get(terminal)) is not None and len(stack) < limits.PARSER_DEPTH:
            action, target = found
            if action == SHIFT:
                return Parser(self.table, (*stack, target))
            symbol, length = self.table.rules[target]
            del stack[len(stack) - length:]
            stack.append(self.table.actions[stack[-1]][symbol][1])
            if terminal == END and stack[-1] == self.table.last:
                return Parser(self.table, tuple(stack))
        return None

    @property
    def depth(self) -> int:
        """Symbols on the stack."""
        return len(self.stack) - 1


def tables(source: str) -> dict[str, Any]:
    """A grammar as data that JSON can carry; raises Refusal for one that is not LALR(1), or too large."""
    lark = read(source)
    if reason := endless(rules_of_lark(source), "start"):
        raise Refusal(f"The Lark grammar cannot be used: {reason}. Change or remove that part.")
    parse = lark.parser.parser.parser.parse_table
    ordered = sorted(lark.terminals, key=lambda t: (-t.priority, not _literal(t), -len(t.pattern.value)))
    if len(ordered) > limits.TERMINALS:
        raise too_large(f"{len(ordered)} terminals, and at most {limits.TERMINALS} are accepted")
    if len(parse.states) > limits.PARSER_STATES:
        raise too_large(f"{len(parse.states):,} parser states, and at most {limits.PARSER_STATES:,} are accepted")
    return {"terminals": [[t.name, repr(t.pattern.value) if _literal(t) else t.name] for t in ordered],
            "automata": _automata(ordered), "ignored": list(lark.ignore_tokens), **_packed(parse)}


def table_of(data: dict[str, Any]) -> Table:
    """The parse table in the answer of `tables`."""
    actions = [{symbol: (action, target) for symbol, action, target in state} for state in data["states"]]
    return Table(actions, [(symbol, length) for symbol, length in data["rules"]], data["first"], data["last"])


def automata_of(data: dict[str, Any]) -> dict[str, DFA]:
    """The automata in the answer of `tables`, by terminal; of two that fit the first is meant."""
    return {name: _automaton(*packed) for (name, _), packed in zip(data["terminals"], data["automata"])}


def read(source: str) -> Lark:
    """The grammar, read by the library lark; raises Refusal with the conflict where it is not LALR(1)."""
    try:
        return Lark(source, parser="lalr", lexer=_no_lexer(), strict=True)
    except LarkError as reason:
        said = " ".join(str(reason).split())
        raise Refusal(
            f"SynCode cannot read this grammar: {said[:200]}. Change that part, or use lark in place of syncode.",
            "source",
        ) from None


def too_large(reason: str) -> Refusal:
    return Refusal(
        f"The grammar is too large for SynCode: it has {reason}. Make it smaller, or use lark in place of syncode.",
        "source",
    )


def _no_lexer() -> type:
    """Takes the place of the library's lexer: ours reads bytes and gives the parser terminals alone."""
    class NoLexer(Lexer):
        def __init__(self, settings):
            pass

        def lex(self, state):
            return iter(())

    return NoLexer


def _literal(terminal: Any) -> bool:
    return type(terminal.pattern).__name__ == "PatternStr"


def _automata(terminals: list) -> list[tuple[str, list[int]]]:
    """Each as its table in base64 and its final states."""
    found, total = [], 0
    for terminal in terminals:
        automaton = compiled(terminal.pattern.to_regexp())
        total += len(automaton.finals)
        if total > limits.DFA_STATES:
            raise too_large(f"more than {limits.DFA_STATES:,} states in the automata of its terminals")
        flat = array("h", [target for row in automaton.table for target in row])
        found.append(
            (b64encode(flat.tobytes()).decode(), [state for state, final in enumerate(automaton.finals) if final])
        )
    return found


def _automaton(packed: str, finals: list[int]) -> DFA:
    flat, ends = array("h", b64decode(packed)).tolist(), set(finals)
    table = [flat[at:at + BYTES] for at in range(0, len(flat), BYTES)]
    return DFA(table, [state in ends for state in range(len(table))])


def _packed(parse: Any) -> dict[str, Any]:
    rules = {
        rule: number
        for number, rule in enumerate(
            {target for state in parse.states.values() for _, target in state.values() if not isinstance(target, int)}
        )
    }
    states = [
        [
            [symbol, int(target in rules), rules.get(target, target)]
            for symbol, (_, target) in parse.states[number].items()
        ]
        for number in range(len(parse.states))
    ]
    return {"states": states, "rules": [[rule.origin.name, len(rule.expansion)] for rule in rules],
            "first": parse.start_states["start"], "last": parse.end_states["start"]}
