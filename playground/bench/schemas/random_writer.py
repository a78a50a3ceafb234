"""Texts that only the grammar has a say in: what would a model write that knows nothing and comes to an end?"""
from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playground.engine.grammar_matcher import Matcher
    from playground.engine.tokens import Tokens

# how often a token that closes something, and one that is a single letter, is taken where there is one
ENDING, SHORT = 0.3, 0.3
CLOSERS = b'"]}'


class Scribbler:
    """Draws from the mask, often a token that closes a string, a list or an object: drawn evenly, few texts would ever
    end.
    """

    def __init__(self, tokens: Tokens, vocabulary: int):
        read = [(token, tokens.bytes(token)) for token in range(vocabulary)]
        self.closing = {token for token, spelt in read if any(letter in spelt for letter in CLOSERS)}
        self.short = {token for token, spelt in read if len(spelt) == 1 and spelt.isalnum()}

    def write(self, matcher: Matcher, seed: int, most: int) -> list[int] | None:
        """Tokens of a whole text, the end left out; None where it grew beyond `most`. The matcher follows."""
        chance, written = Random(seed), []
        while len(written) < most:
            if matcher.stopped or matcher.accepting and chance.random() < ENDING:
                return written
            allowed = matcher.mask().nonzero()[:, 0].tolist()
            token = self._choose(allowed, chance)
            if not allowed or token in matcher.ends:
                return written if allowed else None
            matcher.advance(token)
            written.append(token)
        return written if matcher.accepting else None

    def _choose(self, allowed: list[int], chance: Random) -> int:
        way = chance.random()
        liked = self.closing if way < ENDING else self.short if way < ENDING + SHORT else set()
        some = [token for token in allowed if token in liked]
        return chance.choice(some or allowed or [-1])
