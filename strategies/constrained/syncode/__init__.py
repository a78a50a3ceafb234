"""SynCode: a parser, and a store of masks made beforehand."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import ClassVar

import torch
from torch import Tensor

from playground.algorithms.constrained.bundled_grammars import ready_grammar
from playground.contract import Constraint, knob
from playground.errors import Refusal
from playground.events import Event, Figure, Note
from playground.grammar.client import compiled_tables
from playground.grammar.lark.byte_dfa import DEAD, DFA
from playground.grammar.lark.lalr import END, Parser, automata_of, table_of
from strategies.constrained.syncode.mask_store import MaskStore, stored

EXAMPLE = 'start: sum\nsum: part ("+" part)*\npart: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}(\\.[0-9]+)?/'
OWN = "own"
READY = ("arithmetic", "date", "json")  # those in the dialect that both engines read
SHOWN = 12  # accept sequences


@dataclass(frozen=True)
class LexState:
    """The lexer's state: complete lexemes, and a remainder that is or may become one."""

    parser: Parser  # after the lexemes
    states: dict[str, int]  # by terminal that the remainder may belong to: the state of its automaton
    remainder: bytes = b""
    lexemes: tuple[tuple[str, bytes], ...] = ()


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
        return self._begun(self._start, ())

    def advance(self, at: LexState, byte: int) -> LexState | None:
        """The state after one more byte; None if no terminal continues with it. Lexemes match greedily."""
        states = {
            t: following for t, state in at.states.items() if (following := self.automata[t].step(state, byte)) != DEAD
        }
        if states:
            return LexState(at.parser, states, at.remainder + bytes([byte]), at.lexemes)
        whole = self.whole(at)
        return (
            self.advance(self._begun(self.fed(at, whole[0]), (*at.lexemes, (whole[0], at.remainder))), byte)
            if whole
            else None
        )

    def _begun(self, parser: Parser, lexemes: tuple) -> LexState:
        return LexState(
            parser, dict.fromkeys((parser.accepts() | self.ignored) & self.automata.keys(), 0), b"", lexemes
        )

    def whole(self, at: LexState) -> list[str]:
        """Terminals that the remainder matches completely, the preferred one first."""
        return [t for t in self.automata if at.remainder and t in at.states and self.automata[t].finals[at.states[t]]]

    def fed(self, at: LexState, terminal: str) -> Parser:
        """The parser after one more terminal, which it accepts."""
        return at.parser if terminal in self.ignored else at.parser.fed(terminal)

    def following(self, at: LexState, terminal: str) -> set[str]:
        """Terminals that may follow a terminal, if it is complete; END if the text may end."""
        return self.fed(at, terminal).accepts() | self.ignored

    def may_end(self, at: LexState) -> bool:
        if not at.remainder:
            return END in at.parser.accepts()
        return any(END in self.following(at, t) for t in self.whole(at)[:1])

    def kind(self, at: LexState) -> str:
        """The remainder, in a few words."""
        if not at.remainder:
            return "nothing is begun"
        names = " or ".join(self.shown[t] for t in self.whole(at))
        return f"{at.remainder.decode('utf-8', 'replace')!r} " + (
            f"is {names}, or may grow" if names else "is the beginning of a terminal"
        )


@dataclass
class MaskLookup:
    """Result of the store at one position: tokens [V], and their counts by accept sequence."""

    sure: Tensor
    undecided: Tensor
    sequences: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # tokens inside, across and undecided

    @classmethod
    def nothing_known(cls, vocabulary: int) -> MaskLookup:
        return cls(torch.zeros(vocabulary, dtype=torch.bool), torch.ones(vocabulary, dtype=torch.bool))


@dataclass(frozen=True)
class Agreement:
    """Agreement of store and engine, in tokens."""

    sure: int
    undecided: int
    passed: int  # of the undecided, by the engine
    overruled: int  # of the sure, by the engine
    missed: int  # legal by the engine, and not by the store


def tallied(legal: Tensor, sure: Tensor, undecided: Tensor) -> Agreement:
    """Counts over tokens [V] with text, by the engine and by the store."""
    counts = (sure, undecided, undecided & legal, sure & ~legal, legal & ~sure & ~undecided)
    return Agreement(*(int(part.sum()) for part in counts))


class SynCode(Constraint):
    """Only tokens that keep the text a prefix of a sentence of the grammar are allowed; a mask store shows how many of
    them a lookup decides.

    A lexer splits the text into lexemes, an LALR parser computes which terminals may come next, and the end of the text
    is in some state of their automata. For a terminal, a state and the next terminal, a store holds the tokens that
    stay inside or cross over; it is cached for later runs with the same grammar and tokenizer. It covers no more than
    two terminals: longer tokens are undecided and are checked by the exact engine, or removed. Here the engine computes
    its mask of all tokens at every position as well, and removes what it rejects, so the lookups are compared with it
    and save no time. The released code allows everything where its parser fails. Ours are the additional engine, the
    lexer that matches greedily among the terminals the parser accepts, like the engine, and second terminals by the
    parser's state in place of all neighbours. Checked, it writes what `lark` writes, except that \\d, \\w and \\s are
    ASCII. Engine: llguidance; parser: lark. Ugare et al. 2024, arXiv 2403.01632.
    """

    name, title, paper, sheet = "syncode", "SynCode (mask store)", "2403.01632", "constrained/syncode"
    guarantee = ("constraint_sound",)

    ready: str = knob(OWN, choices=(OWN, *READY), help="a bundled grammar, in place of your own")
    source: str = knob(
        EXAMPLE, multiline=True, file=True, help="your own grammar, LALR(1); its first rule is called start"
    )
    undecided: str = knob(
        "checked",
        choices=("checked", "banned"),
        help="tokens that extend beyond two terminals: checked by the exact engine, or removed",
    )

    terminals: ClassVar[Terminals]  # these come with the lane
    begins: ClassVar[int]
    spelling: ClassVar[Callable[[int], bytes]]
    standings: ClassVar[dict[bytes, LexState | None]]
    tallies: ClassVar[dict[bytes, Agreement]]
    store: ClassVar[MaskStore | None] = None

    def grammar(self):
        return "lark", self.source if self.ready == OWN else ready_grammar(self.ready)

    def check_source(self):
        Terminals(self.grammar()[1])

    def begin(self, start, spelling):
        self.begins, self.spelling, self.store = start, spelling, None
        self.terminals = Terminals(self.grammar()[1])
        self.standings, self.tallies = {b"": self.terminals.start()}, {}

    def narrow(self, masks, histories):
        rows = [self._narrowed(mask, self._text(history)) for mask, history in zip(masks, histories)]
        return torch.stack(rows)

    def _narrowed(self, legal: Tensor, text: bytes) -> Tensor:
        found = self.looked_up(text, len(legal))
        sure, undecided = (part.to(legal.device) for part in (found.sure, found.undecided))
        self.tallies[text] = tallied(
            *(part & (self.store.lengths > 0).to(legal.device) for part in (legal, sure, undecided))
        )
        return legal & (sure | undecided if self.undecided == "checked" else sure)

    def permits(self, history, token, vocabulary):
        found = self.looked_up(self._text(history), vocabulary)
        return bool(found.sure[token]) or self.undecided == "checked" and bool(found.undecided[token])

    def looked_up(self, text: bytes, vocabulary: int) -> MaskLookup:
        """Result of the store for each token after a text. Nothing is decided if the lexer cannot follow the text."""
        self.store = self.store or self._opened(vocabulary)
        self.store.begin_step()
        at = self._standing(text)
        found = MaskLookup.nothing_known(vocabulary)
        if at is None:
            return found
        found.undecided = torch.zeros_like(found.undecided)
        for terminal, state in at.states.items():
            self._add(found, at, terminal, state)
        if self.terminals.may_end(at):
            found.sure |= self.store.lengths == 0  # the engine decides which of those is an end
        found.undecided &= ~found.sure
        return found

    def _opened(self, vocabulary: int) -> MaskStore:
        spelled = [self.spelling(token) for token in range(vocabulary)]
        return MaskStore(stored(self.grammar()[1], spelled), self.terminals.automata)

    def _add(self, found: MaskLookup, at: LexState, terminal: str, state: int) -> None:
        inside = self.store.inside(terminal, state)
        found.sure |= inside
        for following in sorted(self.terminals.following(at, terminal)):
            across = self.store.then(terminal, state, following) if following != END else MaskLookup.nothing_known(0)
            found.sequences[terminal, following] = [int(part.sum()) for part in (inside, across.sure, across.undecided)]
            if following != END:
                found.sure |= across.sure
                found.undecided |= across.undecided

    def _text(self, history: list[int]) -> bytes:
        return b"".join(map(self.spelling, history[self.begins:]))

    def _standing(self, text: bytes) -> LexState | None:
        """The lexer's state after a text, from its longest known prefix."""
        known = next(end for end in range(len(text), -1, -1) if text[:end] in self.standings)
        at = self.standings[text[:known]]
        for byte in text[known:]:
            at = self.terminals.advance(at, byte) if at else None
        self.standings[text] = at
        return at

    def explain(self, history, token) -> Iterator[Event]:
        text, place = self._text(history), len(history) - self.begins
        at, tally = self._standing(text), self.tallies.get(text)
        if at is None:
            yield Note(
                "The lexer of the store cannot follow this text, so every token is asked of the exact engine, or"
                " banned."
            )
        if at is None or tally is None:
            return
        sequences = sorted(
            self.looked_up(text, len(self.store.lengths)).sequences.items(), key=lambda entry: -sum(entry[1])
        )[:SHOWN]
        yield Figure("matrix", "accept sequences and what the store holds for them, tokens", {
            "rows": [" ".join(self.terminals.shown[t] for t in sequence) for sequence, _ in sequences],
            "columns": ["inside", "across", "undecided"], "values": [counts for _, counts in sequences]})
        yield Figure("scalar", "tokens by who decided", {"x": place, "series": {
            "store: legal": tally.sure, "undecided": tally.undecided, "of them legal by the engine": tally.passed}})
        yield Note(self._said(at, tally))

    def _said(self, at: LexState, tally: Agreement) -> str:
        lexemes = (
            " ".join(f"{self.terminals.shown[t]}:{text.decode('utf-8', 'replace')!r}" for t, text in at.lexemes[-3:])
            or "none yet"
        )
        says = (
            f"Lexemes {'… ' if len(at.lexemes) > 3 else ''}{lexemes}; {self.terminals.kind(at)}. Parser"
            f" {at.parser.depth} deep. "
        )
        says += (
            f"{len(self.store.used)} lookups so far. {tally.undecided} tokens undecided, {tally.passed} of them"
            " legal."
        )
        if tally.overruled or tally.missed:
            says += (
                f" The engine refused {tally.overruled} that the store would let through, and knew {tally.missed} more."
            )
        return says
