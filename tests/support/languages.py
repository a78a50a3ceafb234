"""Languages that a constraint allows, found by trying all texts."""
from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest
from toys import byte_tokenizer

from playground.contract import Constraint
from playground.grammar.matcher import GrammarEngine

TOKENIZER = byte_tokenizer(merges=0)  # a token is a byte, so that a text has one tokenisation only
END = TOKENIZER.eos_token_id
MOST = 400  # texts: the languages here are smaller


@pytest.fixture(scope="module")
def byte_engine() -> GrammarEngine:
    return GrammarEngine(TOKENIZER, len(TOKENIZER), [END])


def language(engine: GrammarEngine, constraint: Constraint) -> set[str]:
    """Every text that can be written under a constraint, by following each token of its masks, narrowed as it does."""
    constraint.begin(0, lambda token: b"" if token == END else TOKENIZER.decode([token]).encode())
    grammar, found, beginnings = engine.compile(*constraint.grammar()), set(), [[]]
    while beginnings:
        beginning = beginnings.pop()
        matcher = grammar.matcher()
        assert all(matcher.advance(token) for token in beginning), "a token of the mask is refused"
        if matcher.accepting:
            found.add(TOKENIZER.decode(beginning))
        assert len(found) <= MOST, "the language is larger than it should be"
        if matcher.stopped:
            continue
        legal = constraint.narrow(matcher.mask()[None], [beginning])[0].nonzero()[:, 0].tolist()
        assert all(constraint.permits(beginning, token, len(TOKENIZER)) for token in legal)
        beginnings += [[*beginning, token] for token in legal if token != END]
    return found


def spelled(letters: str, longest: int) -> Iterable[str]:
    """All texts of these letters."""
    for length in range(longest + 1):
        yield from map("".join, product(letters, repeat=length))
