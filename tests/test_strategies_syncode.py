"""SynCode: a lexer over bytes, a mask store, and a grammar engine that decides the rest."""
from __future__ import annotations

import ast
import random
import re
from itertools import product

import pytest
import torch
from toys import END

from playground.contract import make
from playground.errors import Refusal
from playground.grammar.lark.byte_dfa import DEAD, compiled, encoded
from playground.grammar.matcher import GrammarEngine
from strategies.constrained.syncode import Terminals
from strategies.constrained.syncode.mask_store import Lookup, MaskStore, StoredMasks
from support.dates import is_day
from support.syncode_grammars import EXACT, SOURCES, TOKENIZER, TOKENS, WORDS

SPELLED = [TOKENS.bytes(token) for token in range(len(TOKENIZER))]


def calculates(text: str) -> bool:
    return (
        bool(re.fullmatch(r"[0-9+]+", text))
        and text.count("+") in (1, 2, 3)
        and ast.parse(text, mode="eval") is not None
    )


SHORT = 'start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[1-9][0-9]?/'
SOUND = {
    "syncode": [
        ({"source": SHORT}, calculates),
        ({"source": SHORT, "undecided": "banned"}, calculates),
        ({"ready": "date"}, is_day),
    ]
}


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    return GrammarEngine(TOKENIZER, len(TOKENIZER), [TOKENIZER.convert_tokens_to_ids(END)])


# --- automata ---

PATTERNS = [
    "",
    "ab|a",
    "(a|b)*c",
    "a{2,3}b?",
    "[a-c]+x",
    "[^ab]b",
    ".b",
    "(?:a{2}){2}",
    "(ab){0,2}c*",
    r"\d+\.\d",
    "[a-]b",
    "[]a]b",
    r"[\x61-\u00e9]",
    "é|日本",
    "a+?b",
    "(?:a|)b",
    "[^\\x00-\\x7f]a",
    "a{0}b",
    "(a*)*b",
    "[à-ÿ日-本]",
]
LETTERS = "abcx1.- é日]本"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_automaton_accepts_the_texts_of_its_expression(pattern):
    automaton, meant = compiled(pattern), re.compile(pattern)
    for length in range(4):
        for letters in product(LETTERS, repeat=length):
            text = "".join(letters)
            assert automaton.matches(text.encode()) == (meant.fullmatch(text) is not None), text
    assert automaton.matches(b"aaaa") == (meant.fullmatch("aaaa") is not None)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_state_reaches_an_accepting_state(pattern):
    automaton = compiled(pattern)
    ends = {state for state, final in enumerate(automaton.finals) if final}
    for _ in automaton.finals:
        ends |= {state for state, row in enumerate(automaton.table) if not ends.isdisjoint(row)}
    assert {target for row in automaton.table for target in row} <= ends | {DEAD}


@pytest.mark.parametrize(
    "low, high",
    [(0, 0x7F), (0x41, 0x3FF), (0x7F, 0x801), (0xD700, 0xE010), (0xFFF0, 0x10010), (0x10FFF0, 0x10FFFF), (0xE9, 0xE9)],
)
def test_ranges_of_letters_are_the_ranges_of_their_bytes(low, high):
    sequences = encoded(low, high)
    for code in [*range(max(0, low - 70), low + 300), *range(high - 300, min(high + 70, 0x110000))]:
        if not 0 <= code < 0x110000 or 0xD800 <= code <= 0xDFFF:
            continue
        spelled = chr(code).encode()
        met = sum(
            len(sequence) == len(spelled) and all(a <= byte <= b for byte, (a, b) in zip(spelled, sequence))
            for sequence in sequences
        )
        assert met == (low <= code <= high), hex(code)


@pytest.mark.parametrize(
    "pattern", ["a(?=b)", "(?i:a)", "^a", "a$", r"\bx", r"(a)\1", "a{2000}", "(a", "a)", "[a", "*a"]
)
def test_non_regular_expressions_are_refused(pattern):
    with pytest.raises(Refusal, match="byte by byte"):
        compiled(pattern)


@pytest.mark.parametrize("pattern", ["(" * 3000 + "a" + ")" * 3000, "(.{900}){900}", "[ab]*a[ab]{16}"])
def test_too_many_states_are_refused(pattern):
    with pytest.raises(Refusal, match="too large"):
        compiled(pattern)


# --- the mask store against its definition ---

def by_definition(store: MaskStore, first: str, state: int, second: str, text: bytes) -> tuple[bool, bool]:
    """(certainly allowed, undecided), of a token that has to leave the first terminal."""
    one, two = store.automata[first], store.automata[second]
    end = max(end for end in range(len(text) + 1) if one.run(text[:end], state) != DEAD)
    if end == len(text) or not one.finals[one.run(text[:end], state)]:
        return False, False
    rest = text[end:]
    reached = max(cut for cut in range(len(rest) + 1) if two.run(rest[:cut]) != DEAD)
    return reached == len(rest), 0 < reached < len(rest) and two.finals[two.run(rest[:reached])]


@pytest.mark.oracle("syncode")
@pytest.mark.parametrize("name", ["sums", "words", "json"])
def test_every_lookup_equals_its_definition(name):
    terminals = Terminals(make("syncode", **SOURCES[name]).grammar()[1])
    store = MaskStore(StoredMasks(SPELLED), terminals.automata)
    for first, second in product(terminals.automata, repeat=2):
        for state in range(min(4, len(terminals.automata[first].finals))):
            found = store.then(first, state, second)
            wanted = [by_definition(store, first, state, second, text) for text in SPELLED]
            assert list(zip(found.sure.tolist(), found.undecided.tolist())) == wanted
            inside = [bool(text) and terminals.automata[first].run(text, state) != DEAD for text in SPELLED]
            assert store.inside(first, state).tolist() == inside


# --- the mask store against the engine ---

def walked(engine: GrammarEngine, strategy, seed: int, steps: int):
    """Positions of a text sampled under the engine: (tokens the engine allows, result of the store)."""
    matcher, chance, history = engine.compile(*strategy.grammar()).matcher(), random.Random(seed), []
    for _ in range(steps):
        legal = matcher.mask()
        yield legal, strategy.looked_up(strategy._text(history), len(legal))
        followed = [token for token in legal.nonzero()[:, 0].tolist() if token not in matcher.ends]
        if not followed:
            return
        history.append(chance.choice(followed))
        matcher.advance(history[-1])


def begun(name: str):
    strategy = make("syncode", **SOURCES[name])
    strategy.begin(0, TOKENS.bytes)
    return strategy


def disagreements(engine: GrammarEngine, name: str) -> tuple[int, int, int]:
    """Tokens that the store misses, tokens it is wrongly certain of, and tokens it leaves undecided, over 24 texts; the
    end token has its own test.
    """
    missed = wrong = open_ = 0
    strategy, spelled = begun(name), torch.tensor([len(text) for text in SPELLED]) > 0
    for seed in range(24):
        for legal, found in walked(engine, strategy, seed, 10):
            sure, legal = found.sure & spelled, legal & spelled
            missed += int((legal & ~found.sure & ~found.undecided).sum())
            wrong, open_ = wrong + int((sure & ~legal).sum()), open_ + int(found.undecided.sum())
    return missed, wrong, open_


@pytest.mark.oracle("syncode")
@pytest.mark.parametrize("name", EXACT)
def test_the_mask_store_is_complete_and_its_certain_tokens_are_allowed(engine, name):
    missed, wrong, undecided = disagreements(engine, name)
    assert (missed, wrong) == (0, 0)
    assert undecided > 0 or name == "date"


def never_across(store, terminal, state, following):
    entry = store._entry(terminal, state, following)
    return Lookup(torch.zeros_like(entry.sure), torch.zeros_like(entry.sure))


def sure_of_all(store, terminal, state, following):
    entry = store._entry(terminal, state, following)
    return Lookup(entry.sure | entry.undecided, torch.zeros_like(entry.sure))


def from_the_start(store, terminal, state, following):
    return store._entry(terminal, 0, following)


@pytest.mark.refuses("syncode")
@pytest.mark.parametrize("wrong", [never_across, sure_of_all, from_the_start])
def test_a_wrong_mask_store_differs_from_the_engine(engine, wrong, monkeypatch):
    monkeypatch.setattr(MaskStore, "then", wrong)
    assert disagreements(engine, "arithmetic")[:2] != (0, 0)


@pytest.mark.parametrize("name", EXACT)
def test_the_end_is_allowed_where_the_engine_allows_it(engine, name):
    strategy = begun(name)
    for seed in range(10):
        for legal, found in walked(engine, strategy, seed, 12):
            assert bool(legal[engine.end_index].any()) == bool(found.sure[engine.end_index].any())


# --- incomplete words ---

def terminals_after(text: str, source: str = WORDS) -> set[str]:
    terminals = Terminals(source)
    at = terminals.start()
    for byte in text.encode():
        at = terminals.advance(at, byte)
    return {terminals.shown[t] for t in at.states}


@pytest.mark.parametrize(
    "text, may_be",
    [
        ("de", {"'def'", "NAME"}),
        ("def", {"'def'", "NAME"}),
        ("defx", {"NAME"}),
        ("def ", {"WS"}),
        ("x<", {"'<'", "'<='"}),
        ("x<=", {"'<='"}),
        ("x<1", {"NUMBER"}),
        ("x < 1.", {"NUMBER"}),
        ("x<1.5e3", {"NUMBER"}),
    ],
)
def test_a_remainder_may_be_any_terminal_it_is_a_prefix_of(text, may_be):
    assert terminals_after(text) == may_be


def test_an_incomplete_character_is_part_of_the_remainder():
    terminals = Terminals('start: "größe"')
    at = terminals.start()
    for byte in "grö".encode()[:-1]:
        at = terminals.advance(at, byte)
    assert (
        at.remainder == b"gr\xc3"
        and terminals.advance(at, 0x20) is None
        and terminals.advance(at, 0xB6).remainder == "grö".encode()
    )
