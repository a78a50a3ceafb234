"""A grammar engine over byte tokens, for tests of constraints."""
from __future__ import annotations

import pytest
from toys import END, byte_tokenizer

from playground.engine.text.tokens import Tokens
from playground.grammar.matcher import GrammarEngine

TOKENIZER = byte_tokenizer(merges=80)
TOKENS = Tokens(TOKENIZER, len(TOKENIZER))


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    return GrammarEngine(TOKENIZER, len(TOKENIZER), [TOKENIZER.convert_tokens_to_ids(END)])


def accepts(engine: GrammarEngine, constraint, text: str) -> bool:
    matcher = engine.compile(*constraint.grammar()).matcher()
    return all(matcher.advance(token) for token in TOKENS.encode(text)) and matcher.accepting
