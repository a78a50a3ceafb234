"""Token ids of an encoder-decoder model: the source, a mark where the decoder starts, and what the decoder writes."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from playground.engine.text.tokens import Tokens

MARK = "<decoder starts>"


class SourceTokens(Tokens):
    """A tokenizer whose prompts end with the mark, and with the tokens that every text of the decoder begins with.

    Encoder and decoder have one vocabulary, and some start the decoder with a token that a source may have too, such as
    the end token. The mark is an id of its own, the first beyond the network's vocabulary, so that a text says by
    itself where its source ends.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, begin: Sequence[int] = ()):
        """`vocabulary`: of the network, without the mark. `begin`: forced tokens at the start of the decoder's text."""
        super().__init__(tokenizer, vocabulary + 1)
        self.mark, self._begin = vocabulary, tuple(begin)

    def encode(self, text: str) -> list[int]:
        return [*super().encode(text), self.mark, *self._begin]

    def encode_chat(
        self, user: str, system: str = "", before: Iterable[tuple[str, str]] = (), tools: str = ""
    ) -> list[int]:
        return [*super().encode_chat(user, system, before, tools), self.mark, *self._begin]

    def has_text(self, ids: Iterable[int]) -> bool:
        """As of the decoder's text, which a source does not begin."""
        known = list(ids)
        return super().has_text(known[known.index(self.mark) + 1:] if self.mark in known else known)

    def is_special(self, id: int) -> bool:
        return id == self.mark or super().is_special(id)

    def bytes(self, id: int) -> bytes:
        return b"" if id == self.mark else super().bytes(id)

    def piece(self, id: int) -> str:
        return MARK if id == self.mark else super().piece(id)
