"""Tokens that a grammar forces, found within limits: against llguidance's own, where it returns."""
from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from llguidance import LLMatcher
from toys import byte_tokenizer

from playground.grammar.forced_bytes import NO_FORCING, ForcedBytes
from playground.grammar.kinds import parser_limits
from playground.grammar.matcher import GrammarEngine
from playground.grammar.triggered_grammar import TriggeredSource

TOKENIZER = byte_tokenizer(merges=80)
ENGINE = GrammarEngine(TOKENIZER, len(TOKENIZER), [0])
GRAMMARS = {
    "a word before a letter": 'start: "the tree" LETTER\nLETTER: /[abs]/',
    "a word again and again": 'start: "the tree" (" and " "the tree")* "."',
    "free text around a word": 'start: WORD NUMBER\nWORD: /[a-z]+/\nNUMBER: /[0-9]+/ " the end of it"',
    "words with one beginning": 'start: "while the " ("tree" | "trees" | "the" | "then")',
    "one that has the other as its beginning": 'start: "the tree" | "the trees stand" | "the tree stands"',
    "a schema": 'start: %json {"type": "object", "properties": {"name": {"enum": ["the tea", "the trees"]}, '
                '"old": {"type": "boolean"}}, "required": ["name", "old"], "additionalProperties": false}',
    "letters of several bytes": 'start: "é" "日本語 text" /[0-9]/ "naïve"',
    "a repeat": 'start: "a"{40} "b"',
    "a lazy rule": 'start: free " the end"\nfree[lazy]: /[a-z ]*END/',
}
ENDLESS = """\
from toys import byte_tokenizer
from playground.grammar.matcher import GrammarEngine
tokenizer = byte_tokenizer(merges=80)
source = 'start: %lark {\\nstart: C B\\nB: "a"\\nC: /c(ab)*/\\n}\\n'
matcher = GrammarEngine(tokenizer, len(tokenizer), [0]).compile("lark", source).matcher()
assert matcher.advance(tokenizer.encode("c")[0])
print(matcher.state, int(matcher.mask().sum()), tokenizer.decode(matcher.forced())[:8])
"""


def parser(source: str) -> LLMatcher:
    return LLMatcher(ENGINE.llguidance, LLMatcher.grammar_from_lark(source), log_level=0, limits=parser_limits())


def masks_along(source: str, seed: int, own_token: Callable[[LLMatcher, list[int]], int | None]) -> list[tuple]:
    """Along a random text, the tokens that llguidance allows where it forces, and those that are left without it."""
    forcing, free, path, pairs = parser(source), parser(f"{source}\n{NO_FORCING}"), [], []
    chance = random.Random(seed)
    while not forcing.is_stopped() and len(path) < 40:
        theirs, allowed = (set(_tokens(each.compute_bitmask())) for each in (forcing, free))
        own = None if len(allowed) == 1 or free.is_accepting() else own_token(free, path)
        pairs.append((theirs, allowed if own is None else {own}))
        path.append(chance.choice(sorted(allowed)))
        if not (forcing.consume_token(path[-1]) and free.consume_token(path[-1])):
            break
    return pairs


def _tokens(bitmask: bytes) -> list[int]:
    return [8 * i + bit for i, byte in enumerate(bitmask) for bit in range(8) if byte >> bit & 1]


def found(parser: LLMatcher, path: list[int]) -> int | None:
    return ForcedBytes(ENGINE.llguidance).extended(parser).own_token(path)


@pytest.mark.parametrize("source", GRAMMARS.values(), ids=GRAMMARS)
def test_the_own_token_is_that_of_llguidance_at_every_place(source):
    for seed in range(12):
        for theirs, ours in masks_along(source, seed, found):
            assert ours == theirs


class IgnoresWhatMayFollow(ForcedBytes):
    """Wrong: the last forced token is taken although what follows may change it."""

    def own_token(self, before: list[int]) -> int | None:
        return next(iter(self._tokens(before[-1:])), None)


class IgnoresTheTokenBefore(ForcedBytes):
    """Wrong: a token before the forced bytes does not matter to the tokenizer."""

    def own_token(self, before: list[int]) -> int | None:
        return super().own_token([])


def wrong_pairs(cls: type[ForcedBytes]) -> int:
    def own(parser: LLMatcher, path: list[int]) -> int | None:
        known = ForcedBytes(ENGINE.llguidance).extended(parser)
        return cls(ENGINE.llguidance, known.text, known._reaches).own_token(path)

    pairs = [pair for source in GRAMMARS.values() for seed in range(12) for pair in masks_along(source, seed, own)]
    return sum(theirs != ours for theirs, ours in pairs)


@pytest.mark.parametrize("cls", [IgnoresWhatMayFollow, IgnoresTheTokenBefore])
def test_a_rule_that_looks_at_less_is_detected(cls):
    assert wrong_pairs(ForcedBytes) == 0 < wrong_pairs(cls)


def test_what_is_known_moves_along_with_the_text():
    matcher = ENGINE.compile("lark", GRAMMARS["a repeat"]).matcher()
    assert matcher.state == f"must continue {'a' * 40!r}"
    run = matcher.forced()
    assert TOKENIZER.decode(run) == "a" * 40 + "b"
    for token in run:
        assert matcher.mask().nonzero().flatten().tolist() == [token] and matcher.advance(token)
    assert matcher.accepting


def test_a_repeat_of_a_million_letters_is_forced_step_by_step():
    matcher = ENGINE.compile("lark", 'start: "a"{1000000}').matcher()
    assert set(TOKENIZER.decode(matcher.forced())) == {"a"} and not matcher.accepting


def test_a_terminal_that_goes_on_for_ever_holds_nobody():
    """In a process of its own: without the limit the call never returns."""
    said = subprocess.run(
        [sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": ".:tests"}
    )
    assert said.stdout.strip() == f"must continue {'ab' * 20!r} 1 abababab", said.stderr


@pytest.mark.parametrize("source", [
    '%llguidance {"no_forcing": false}\nstart: "the tree"',
    'start: "the tree"\n%llguidance {"no_forcing": false}',
    'start: %lark {\nstart: "the tree"\n%llguidance {"no_forcing": false}\n}',
    'start: "the tree" # a comment at the end',
])
def test_no_directive_of_a_source_has_llguidance_force(source):
    grammar = ENGINE.compile("lark", source)
    assert not grammar.forces and len(_tokens(grammar.fresh().compute_bitmask())) > 1
    assert int(grammar.matcher().mask().sum()) == 1


def test_a_grammar_after_a_trigger_is_not_forced_by_llguidance_either():
    packed = TriggeredSource("lark", GRAMMARS["a repeat"], "<go>", required=True).packed()
    assert not ENGINE.compile("triggered", packed).forces


@pytest.mark.parametrize("kind", ["regex", "choice"])
def test_kinds_without_terminals_of_ones_own_are_forced_by_llguidance(kind):
    assert ENGINE.compile(kind, "the tree").forces
