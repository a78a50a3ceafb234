"""A grammar followed byte by byte, whatever the tokens of a model: what a search for the rest of a text needs."""
from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer

from playground.grammar.client import BYTES, compiler
from playground.grammar.kinds import parser_limits


class ByteMatcher:
    """The state of a grammar after some bytes. Copies are cheap."""

    def __init__(self, parser: LLMatcher):
        self._parser = parser

    @classmethod
    def compiled(cls, kind: str, source: str) -> ByteMatcher:
        """At the start of a grammar, compiled in the compiler process; raises Refusal."""
        text = compiler().compile(kind, source, BYTES, BYTES.digest)["text"]
        return cls(LLMatcher(_bytes(), text, log_level=0, limits=parser_limits()))

    def after(self, text: bytes) -> ByteMatcher | None:
        """The state after more bytes; None if the grammar does not allow them."""
        parser = self._parser.deep_copy()
        return ByteMatcher(parser) if not text or parser.consume_tokens(list(text)) else None

    def allows(self, text: bytes) -> bool:
        """Whether more bytes may follow."""
        return self._parser.validate_tokens(list(text)) == len(text)

    @property
    def accepting(self) -> bool:
        return not self._parser.is_error() and self._parser.is_accepting()

    def forced(self) -> bytes:
        """The bytes without an alternative from here on."""
        return b"" if self._parser.is_error() else self._parser.compute_ff_bytes()

    def following(self) -> list[int]:
        """The bytes that may follow; none in a dead end."""
        bits = int.from_bytes(self._parser.compute_bitmask(), "little")
        return [] if self._parser.is_error() else [byte for byte in range(256) if bits >> byte & 1]


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")
