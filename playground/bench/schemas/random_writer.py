"""Random texts that satisfy a grammar, biased so that they end."""
from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playground.engine.text.tokens import Tokens
    from playground.grammar.matcher import Matcher

ENDING, SHORT = 0.3, 0.3  # probability of choosing a closing token, and one of a single letter or digit, if allowed
CLOSERS = b'"]}'


class RandomWriter:
    """Samples from the token mask, preferring tokens that close a string, list or object: with uniform sampling, few
    texts would end.
    """

    def __init__(self, tokens: Tokens, vocabulary: int):
        spellings = [(token, tokens.bytes(token)) for token in range(vocabulary)]
        self.closing = {token for token, spelling in spellings if any(byte in spelling for byte in CLOSERS)}
        self.short = {token for token, spelling in spellings if len(spelling) == 1 and spelling.isalnum()}

    def write(self, matcher: Matcher, seed: int, most: int) -> list[int] | None:
        """Tokens of a complete text without an end token; None if it exceeds `most` tokens. Advances the matcher."""
        random, written = Random(seed), []
        while len(written) < most:
            if matcher.stopped or matcher.accepting and random.random() < ENDING:
                return written
            allowed = matcher.mask().nonzero()[:, 0].tolist()
            token = self._choose(allowed, random)
            if not allowed or token in matcher.ends:
                return written if allowed else None
            matcher.advance(token)
            written.append(token)
        return written if matcher.accepting else None

    def _choose(self, allowed: list[int], random: Random) -> int:
        u = random.random()
        preferred = self.closing if u < ENDING else self.short if u < ENDING + SHORT else set()
        candidates = [token for token in allowed if token in preferred]
        return random.choice(candidates or allowed or [-1])
