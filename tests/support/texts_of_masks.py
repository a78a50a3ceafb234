"""Every text that a constraint's token masks lead to, against all texts over a few letters that a rule accepts."""
from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from toys import byte_tokenizer

from playground.contract import Constraint
from playground.grammar.matcher import GrammarEngine, Matcher

TOKENIZER = byte_tokenizer(merges=0)  # a token is a byte, so that a text has one tokenisation only


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    return GrammarEngine(TOKENIZER, len(TOKENIZER), [TOKENIZER.eos_token_id])


def check_texts(
    engine: GrammarEngine, constraint: Constraint, letters: str, longest: int, valid: Callable[[str], bool]
) -> None:
    """The texts of these letters, up to a length, that the masks lead to are those that `valid` accepts."""
    texts = ("".join(text) for n in range(longest + 1) for text in product(letters, repeat=n))
    matcher = engine.compile(*constraint.grammar()).matcher()
    assert texts_of_masks(matcher, letters, longest) == {text for text in texts if valid(text)}


def texts_of_masks(matcher: Matcher, letters: str, longest: int) -> set[str]:
    """Every text of these letters, up to a length, that may end there."""
    found, matchers = set(), [("", matcher)]
    tokens = {letter: TOKENIZER(letter, add_special_tokens=False)["input_ids"][0] for letter in letters}
    while matchers:
        text, matcher = matchers.pop()
        if matcher.accepting:
            found.add(text)
        mask = matcher.mask() if len(text) < longest and not matcher.stopped else ()
        for letter in (letter for letter, token in tokens.items() if len(mask) and mask[token]):
            twin = matcher.fork()
            assert twin.advance(tokens[letter]), "a token of the mask is refused"
            matchers.append((text + letter, twin))
    return found
