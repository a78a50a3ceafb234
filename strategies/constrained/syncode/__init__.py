"""SynCode: a parser, and a store of masks made beforehand."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

from playground.algorithms.constrained.bundled_grammars import ready_grammar
from playground.contract import Constraint, knob
from playground.events import Event, Figure, Note
from playground.grammar.lark.lalr import END
from strategies.constrained.syncode.mask_store import BANNED, CHECKED, COMPARES, CONFIRMS, MaskStore, stored
from strategies.constrained.syncode.store_masks import StoreMasks, Tally
from strategies.constrained.syncode.terminals import LexState, Terminals

if TYPE_CHECKING:
    from playground.grammar.matcher import Grammar, LookedUpMatcher

EXAMPLE = 'start: sum\nsum: part ("+" part)*\npart: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}(\\.[0-9]+)?/'
OWN = "own"
READY = ("arithmetic", "date", "json")  # those in the dialect that both engines read
SHOWN = 12  # accept sequences


class SynCode(Constraint):
    """Only tokens that keep the text a prefix of a sentence of the grammar are allowed; a mask store decides about
    nearly all of them in a lookup, and the exact engine confirms the others.

    A lexer splits the text into lexemes, an LALR parser computes which terminals may come next, and the end of the text
    is in some state of their automata. For a terminal, a state and the next terminal, a store holds the tokens that
    stay inside or cross over; it is cached for later runs with the same grammar and tokenizer, and a mask for later
    texts with the same parser stack. It covers no more than two terminals: longer tokens are undecided, and the engine
    is asked about them one by one, or they are removed. The engine also checks every token that is committed; it
    computes its own mask of all tokens only where the lexer cannot follow a text, or to compare. Where the grammar
    forces a text, its tokens are the engine's. With the bundled tokenizer that saves the engine's work and no time: of
    25 masks of a record it computed none and was asked about 60 tokens, but its mask takes 0.06 ms, a lookup 0.2 ms:
    the engine is compiled. Checked, it writes what `lark` writes, except that \\d, \\w and \\s are
    ASCII. The released code allows everything where its parser fails. Ours are the engine's part, the lexer that
    matches greedily among the terminals the parser accepts, like the engine, and second terminals by the parser's state
    in place of all neighbours. Engine: llguidance; parser: lark. Ugare et al. 2024, arXiv 2403.01632.
    """

    name, title, paper, sheet = "syncode", "SynCode (mask store)", "2403.01632", "constrained/syncode"
    guarantee = ("constraint_sound",)

    ready: str = knob(OWN, choices=(OWN, *READY), help="a bundled grammar, in place of your own")
    source: str = knob(
        EXAMPLE, multiline=True, file=True, help="your own grammar, LALR(1); its first rule is called start"
    )
    undecided: str = knob(
        CHECKED,
        choices=(CHECKED, BANNED),
        help="tokens that extend beyond two terminals: checked by the exact engine, or removed",
    )
    engine: str = knob(
        CONFIRMS,
        choices=(CONFIRMS, COMPARES),
        help="the exact engine confirms single tokens only, or computes its own masks as well, to compare",
    )

    begins: ClassVar[int]  # these come with the lane
    spelling: ClassVar[Callable[[int], bytes]]
    terminals: ClassVar[Terminals]
    masks: ClassVar[StoreMasks]

    def grammar(self):
        return "lark", self.source if self.ready == OWN else ready_grammar(self.ready)

    def check_source(self):
        Terminals(self.grammar()[1])

    def begin(self, start, spelling):
        self.begins, self.spelling = start, spelling
        self.terminals = Terminals(self.grammar()[1])

    def matcher(self, grammar: Grammar) -> LookedUpMatcher:
        spelled = [self.spelling(token) for token in range(grammar.engine.vocabulary)]
        store = MaskStore(stored(self.grammar()[1], spelled), self.terminals.automata)
        self.masks = StoreMasks(self.terminals, store, self.spelling, self.undecided, self.engine)
        return grammar.looked_up(self.masks)

    def explain(self, history, token) -> Iterator[Event]:
        text = b"".join(map(self.spelling, history[self.begins:]))
        if text not in self.masks.seen:
            return
        at, tally = self.masks.seen[text]
        if at is None:
            yield Note(
                "The lexer of the store cannot follow this text, so the exact engine computes the mask, or nothing is"
                " allowed."
            )
            return
        if not tally.forced:
            yield from self._lookups(at)
        yield from self._saved(len(history) - self.begins, tally)
        yield Note(self._said(at, tally))

    def _lookups(self, at: LexState) -> Iterator[Figure]:
        """What the store holds for the accept sequences."""
        counts = {
            (t, second): self._counts(t, state, second)
            for t, state in at.states.items() for second in self.terminals.following(at, t)
        }
        most = sorted(counts.items(), key=lambda entry: (-sum(entry[1]), entry[0]))[:SHOWN]
        yield Figure("matrix", "accept sequences and what the store holds for them, tokens", {
            "rows": [" ".join(self.terminals.shown[t] for t in sequence) for sequence, _ in most],
            "columns": ["inside", "across", "undecided"], "values": [values for _, values in most]})

    def _counts(self, *key) -> list[int]:
        """Tokens inside, across and undecided, of a terminal, a state and the next terminal."""
        if key not in self.masks.counts:
            self.masks.counts[key] = self._counted(*key)
        return self.masks.counts[key]

    def _counted(self, terminal: str, state: int, second: str) -> list[int]:
        store = self.masks.store
        across = () if second == END else store.then(terminal, state, second)
        return [int(store.inside(terminal, state).sum()), *([int(part.sum()) for part in across] or [0, 0])]

    def _saved(self, place: int, tally: Tally) -> Iterator[Figure]:
        """What the engine was not asked, and how long both take where they are compared."""
        yield Figure("scalar", "tokens by who decided", {"x": place, "series": {
            "store: legal": tally.sure, "undecided": tally.undecided, "of them legal by the engine": tally.passed}})
        saved = self.masks.savings
        yield Figure("scalar", "masks so far, and what they took", {"x": place, "series": {
            "masks": saved.masks, "lookups in the store": saved.lookups, "computed by the engine": saved.engine_masks}})
        if self.engine == COMPARES:
            yield Figure("scalar", "time of one mask, ms", {"x": place, "series": {
                "store and confirmation": 1000 * tally.seconds, "engine": 1000 * tally.engine_seconds}})

    def _said(self, at: LexState, tally: Tally) -> str:
        saved = self.masks.savings
        says = (
            f"Lexemes {self._last_lexemes(at)}; {self.terminals.kind(at)}. Parser {at.parsers[0].depth} deep."
            f" The engine was asked about {saved.engine_tokens:,} single tokens so far."
        )
        if tally.overruled or tally.missed:
            says += f" The engine would refuse {tally.overruled} tokens of this mask, and allow {tally.missed} more."
        return says

    def _last_lexemes(self, at: LexState) -> str:
        last = [f"{self.terminals.shown[t]}:{text.decode('utf-8', 'replace')!r}" for t, text in at.lexemes[-3:]]
        return ("… " if len(at.lexemes) > 3 else "") + (" ".join(last) or "none yet")
