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
from playground.grammar.matcher import GrammarEngine, LookedUpMatcher, Matcher
from strategies.constrained.syncode import Terminals
from strategies.constrained.syncode.mask_store import Lookup, MaskStore, StoredMasks
from support.dates import is_day
from support.syncode_grammars import OVERLAPPING, SOURCES, TOKENIZER, TOKENS, WORDS

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


# --- the masks against the engine's ---

def store_matcher(engine: GrammarEngine, /, **knobs) -> LookedUpMatcher:
    strategy = make("syncode", **knobs)
    strategy.begin(0, TOKENS.bytes)
    return strategy.matcher(engine.compile(*strategy.grammar()))


def walked(engine: GrammarEngine, knobs: dict, seed: int, steps: int):
    """Positions of a text sampled under the engine: (the engine's mask, the mask of the store's matcher)."""
    matcher, chance = store_matcher(engine, **knobs), random.Random(seed)
    exact = engine.compile(*make("syncode", **knobs).grammar()).matcher()
    for _ in range(steps):
        legal = exact.mask()
        yield legal, matcher.mask()
        followed = [token for token in legal.nonzero()[:, 0].tolist() if token not in exact.ends]
        if not followed:
            return
        token = chance.choice(followed)
        assert exact.advance(token) and matcher.advance(token)


def disagreements(engine: GrammarEngine, knobs: dict, texts: int = 24) -> tuple[int, int]:
    """Tokens that are legal and not in the mask, and tokens in the mask that are illegal, over all positions."""
    missed = wrong = 0
    for seed in range(texts):
        for legal, mask in walked(engine, knobs, seed, 10):
            missed, wrong = missed + int((legal & ~mask).sum()), wrong + int((mask & ~legal).sum())
    return missed, wrong


@pytest.mark.oracle("syncode")
@pytest.mark.parametrize("name", SOURCES)
def test_the_mask_equals_the_engines_at_every_position(engine, name):
    assert disagreements(engine, SOURCES[name]) == (0, 0)


@pytest.mark.oracle("syncode")
@pytest.mark.parametrize("source", OVERLAPPING)
def test_the_mask_equals_the_engines_where_terminals_overlap(engine, source):
    assert disagreements(engine, {"source": source}, texts=8) == (0, 0)


def never_across(store, terminal, state, following):
    entry = THEN(store, terminal, state, following)
    return Lookup(torch.zeros_like(entry.sure), torch.zeros_like(entry.sure))


def sure_of_all(store, terminal, state, following):
    entry = THEN(store, terminal, state, following)
    return Lookup(entry.sure | entry.undecided, torch.zeros_like(entry.sure))


def from_the_start(store, terminal, state, following):
    return THEN(store, terminal, 0, following)


THEN, ALLOWED = MaskStore.then, MaskStore.allowed


@pytest.mark.refuses("syncode")
@pytest.mark.parametrize("wrong", [never_across, sure_of_all, from_the_start])
def test_a_wrong_mask_store_differs_from_the_engine(engine, wrong, monkeypatch):
    monkeypatch.setattr(MaskStore, "then", wrong)
    assert disagreements(engine, {"ready": "arithmetic"}) != (0, 0)


def without_greed(store, states, following):
    """Each terminal may be left where it is complete, although another one goes on."""
    found = [ALLOWED(store, {terminal: state}, following) for terminal, state in states.items()]
    return Lookup(*(torch.stack(parts).any(0) for parts in zip(*found)))


@pytest.mark.refuses("syncode")
def test_a_lexer_that_is_not_greedy_differs_from_the_engine(engine, monkeypatch):
    monkeypatch.setattr(MaskStore, "allowed", without_greed)
    assert disagreements(engine, {"source": OVERLAPPING[0]}) != (0, 0)


# --- what the engine is asked ---

def test_the_engine_computes_no_mask_and_is_asked_about_undecided_tokens_only(engine, monkeypatch):
    monkeypatch.setattr(Matcher, "bitmask", lambda matcher: pytest.fail("the engine computed a mask"))
    matcher = store_matcher(engine)
    for token in TOKENS.encode("(1+2)+3"):
        matcher.mask()
        assert matcher.forced() == [] and matcher.advance(token)
    savings = matcher.source.savings
    assert savings.engine_masks == 0 < savings.lookups <= savings.masks
    assert 0 < savings.engine_tokens < 0.1 * savings.masks * len(TOKENIZER)


def test_a_mask_is_looked_up_once_for_equal_parsers_and_automata(engine):
    matcher = store_matcher(engine, source='start: "\\"" WORD "\\""\nWORD: /[a-z]+/')
    for token in TOKENS.encode('"once'):
        assert matcher.advance(token)
    for letter in "abcdef":
        matcher.mask()
        assert matcher.advance(TOKENS.encode(letter)[0])
    assert (matcher.source.savings.masks, matcher.source.savings.lookups) == (6, 1)


def test_rolling_back_and_forking_keep_the_masks(engine):
    matcher, text = store_matcher(engine, ready="json"), TOKENS.encode('{"a": [1, 2')
    masks = []
    for token in text:
        masks.append(matcher.mask())
        assert matcher.advance(token)
    twin = matcher.fork()
    matcher.rollback(len(text) - 1)
    assert torch.equal(matcher.mask(), masks[1]) and not torch.equal(twin.mask(), masks[1])
    assert twin.advance(TOKENS.encode("]")[0]) and not matcher.advance(TOKENS.encode("]")[0])


def test_removed_tokens_are_those_the_store_leaves_undecided(engine):
    checked, removed = (store_matcher(engine, ready="arithmetic", undecided=how) for how in ("checked", "banned"))
    for token in TOKENS.encode("(1"):
        assert checked.advance(token) and removed.advance(token)
    fewer, more = removed.mask(), checked.mask()
    assert bool((more & ~fewer).any()) and not bool((fewer & ~more).any())
    assert [removed.allows(token) for token in range(len(TOKENIZER))] == fewer.tolist()
    assert [checked.allows(token) for token in range(len(TOKENIZER))] == more.tolist()


def test_compared_masks_are_the_same_and_their_differences_are_counted(engine, monkeypatch):
    def tallies(**knobs):
        matcher = store_matcher(engine, **knobs)
        return matcher.mask(), matcher.source.answer(matcher.place, matcher).tally

    mask, tally = tallies(engine="compares")
    assert torch.equal(mask, tallies()[0]) and (tally.overruled, tally.missed) == (0, 0)
    assert tally.seconds > 0 and tally.engine_seconds > 0
    monkeypatch.setattr(MaskStore, "allowed", lambda store, *key: Lookup(store.lengths > 0, store.lengths < 0))
    assert tallies(engine="compares")[1].overruled > 0 == tallies(engine="compares")[1].missed


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
