"""The lexer and parser of SynCode: which terminals the end of a text may be, and which may follow them."""
from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from playground.errors import Refusal
from playground.grammar.client import compiled_tables
from playground.grammar.lark.byte_dfa import DEAD, DFA
from playground.grammar.lark.lalr import END, Parser, automata_of, table_of

MOST_PARSERS = 16  # readings of one text that are followed

Configuration = tuple[tuple[tuple[int, ...], ...], tuple[tuple[str, int], ...]]
"""The stacks of the parsers, and the states of the automata: what may follow a text depends on nothing else."""


@dataclass(frozen=True)
class LexState:
    """The lexer's state: complete lexemes, and a remainder that is or may become one."""

    parsers: tuple[Parser, ...]  # after the lexemes; several if a lexeme may be one of two terminals
    states: dict[str, int]  # by terminal that the remainder may belong to: the state of its automaton
    remainder: bytes = b""
    lexemes: tuple[tuple[str, bytes], ...] = ()

    @property
    def configuration(self) -> Configuration:
        return tuple(parser.stack for parser in self.parsers), tuple(self.states.items())


class Terminals:
    """The terminals of a grammar, and a parser that computes which of them may come next. Raises Refusal."""

    def __init__(self, source: str):
        if find_spec("lark") is None:
            raise Refusal(
                'syncode reads grammars with the library lark: install it with `pip install "lark>=1.2,<2"`.', "syncode"
            )
        data = compiled_tables(source)
        table = table_of(data)
        self._start = Parser(table, (table.first,))
        self.automata: dict[str, DFA] = automata_of(data)  # of equals the first is meant
        self.shown = {name: shown for name, shown in data["terminals"]} | {END: "the end"}
        self.ignored = frozenset(data["ignored"])
        if empty := next((name for name, automaton in self.automata.items() if automaton.finals[0]), None):
            raise Refusal(
                f"The terminal {self.shown[empty]} may be empty, so the lexer cannot tell how often it occurs: let it"
                " have a letter.",
                "source",
            )

    def start(self) -> LexState:
        """The state of the empty text, which the engine begins with no ignored terminal."""
        return LexState((self._start,), self._from_start(self._start.accepts()))

    def after(self, at: LexState | None, text: bytes) -> LexState | None:
        """The state after more bytes."""
        for byte in text:
            at = self.advance(at, byte) if at else None
        return at

    def advance(self, at: LexState, byte: int) -> LexState | None:
        """The state after one more byte; None if no terminal continues with it. Lexemes match greedily."""
        states = {
            t: following for t, state in at.states.items() if (following := self.automata[t].step(state, byte)) != DEAD
        }
        if states:
            return LexState(at.parsers, states, at.remainder + bytes([byte]), at.lexemes)
        whole = self.whole(at)
        parsers = {parser.stack: parser for t in whole for parser in self.fed(at, t)}
        if not whole or len(parsers) > MOST_PARSERS:
            return None
        return self.advance(self._begun(tuple(parsers.values()), (*at.lexemes, (whole[0], at.remainder))), byte)

    def _begun(self, parsers: tuple[Parser, ...], lexemes: tuple) -> LexState:
        accepted = set().union(*(parser.accepts() for parser in parsers))
        return LexState(parsers, self._from_start(accepted | self.ignored), b"", lexemes)

    def _from_start(self, accepted: set[str]) -> dict[str, int]:
        """The first states of the automata of terminals."""
        return {t: 0 for t in self.automata if t in accepted}

    def whole(self, at: LexState) -> list[str]:
        """Terminals that the remainder matches completely, the preferred one first."""
        return [t for t in self.automata if at.remainder and t in at.states and self.automata[t].finals[at.states[t]]]

    def fed(self, at: LexState, terminal: str) -> list[Parser]:
        """The parsers after one more terminal, those that accept it."""
        if terminal in self.ignored:
            return list(at.parsers)
        return [fed for parser in at.parsers if (fed := parser.fed(terminal)) is not None]

    def following(self, at: LexState, terminal: str) -> set[str]:
        """Terminals that may follow a terminal, if it is complete; END if the text may end."""
        return set().union(*(parser.accepts() for parser in self.fed(at, terminal))) | self.ignored

    def kind(self, at: LexState) -> str:
        """The remainder, in a few words."""
        if not at.remainder:
            return "nothing is begun"
        names = " or ".join(self.shown[t] for t in self.whole(at))
        return f"{at.remainder.decode('utf-8', 'replace')!r} " + (
            f"is {names}, or may grow" if names else "is the beginning of a terminal"
        )
