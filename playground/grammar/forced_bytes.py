"""The bytes that must come next in a grammar, found one at a time and within limits.

llguidance finds all of them in one call. Its terminals match greedily, so after "c" the terminal /c(ab)*/ goes on for
ever where what follows it begins with "a" as well: the call never returns, and no limit of llguidance counts it. A
grammar whose terminals people write is therefore compiled with `NO_FORCING`, and its masks hold every tokenisation of
what is forced. Asking llguidance for forced bytes would still not return.
"""
from __future__ import annotations

from collections.abc import Collection
from time import thread_time

from llguidance import LLMatcher, LLTokenizer

from playground.grammar import limits
from playground.grammar.lark.greedy_lexing import bits

NO_FORCING = '%llguidance {"no_forcing": true}'  # the last such line counts, and that of a grammar inside another, too
LOOKED_AHEAD = 48  # bytes
ALTERNATIVES = 256  # a mask with more tokens is not that of one continuation, whose tokens are prefixes of each other


class ForcedBytes:
    """What is known of them at one place of a text.

    `text` are the bytes, as far as they were looked for, and `reaches` the lengths of the longest token that may begin
    at each of them.
    """

    def __init__(self, tokenizer: LLTokenizer, text: bytes = b"", reaches: tuple[int, ...] = ()):
        self._tokenizer, self.text, self._reaches = tokenizer, text, reaches

    def after(self, token: int) -> ForcedBytes:
        """What is known after one more token."""
        spelled = self._tokenizer.decode_bytes([token])
        if not self.text.startswith(spelled):
            return ForcedBytes(self._tokenizer)
        return ForcedBytes(self._tokenizer, self.text[len(spelled):], self._reaches[len(spelled):])

    def extended(self, parser: LLMatcher, most: int = LOOKED_AHEAD) -> ForcedBytes:
        """With up to `most` bytes; `parser` is at this place."""
        parser, text, reaches = parser.deep_copy(), self.text, list(self._reaches)
        deadline = thread_time() + limits.FORCED_SECONDS
        parser.consume_tokens(self._tokenizer.tokenize_bytes(text))
        while len(text) < most and thread_time() < deadline and not parser.is_accepting():
            spelled = self._spelled(parser.compute_bitmask())
            forced = _common(spelled.values())
            if parser.is_error() or not forced:
                break
            shortest = min(spelled, key=lambda token: len(spelled[token]))
            text += forced
            reaches += [max(map(len, spelled.values()))] + [0] * (len(forced) - 1)
            if spelled[shortest] != forced or not parser.consume_token(shortest):
                break  # no token ends here
        return ForcedBytes(self._tokenizer, text, tuple(reaches))

    def own_token(self, before: list[int]) -> int | None:
        """The tokenizer's own first token of the bytes, after the tokens `before`; None where bytes that are not forced
        may still change it.
        """
        token = next(iter(self._tokens(before[-1:])), None)
        if token is None:
            return None
        length = len(self._tokenizer.decode_bytes([token]))
        open_ended = any(start + reach > len(self.text) for start, reach in enumerate(self._reaches[:length]))
        return None if open_ended else token

    def _tokens(self, last: list[int]) -> list[int]:
        """The tokenizer's own tokens, after the last one of the text if that stays as it is."""
        tokens = self._tokenizer.tokenize_bytes(self._tokenizer.decode_bytes(last) + self.text)
        return tokens[len(last):] if tokens[:len(last)] == last else self._tokenizer.tokenize_bytes(self.text)

    def _spelled(self, bitmask: bytes) -> dict[int, bytes]:
        """The bytes of each token of a mask; nothing for one with many tokens or with a special one."""
        allowed = int.from_bytes(bitmask, "little")
        if allowed.bit_count() > ALTERNATIVES:
            return {}
        tokens = bits(allowed)
        special = any(map(self._tokenizer.is_special_token, tokens))
        return {} if special else {token: self._tokenizer.decode_bytes([token]) for token in tokens}


def _common(texts: Collection[bytes]) -> bytes:
    """What all of these texts begin with."""
    if not texts:
        return b""
    first, last = min(texts), max(texts)
    return first[:next((i for i, (one, other) in enumerate(zip(first, last)) if one != other), len(first))]
