"""Text to token ids and back, such that incremental decoding gives the same text as decoding all ids at once.

Every token has some bytes; a text is their concatenation, decoded as UTF-8. The piece shown for a single token, the
decoding of a whole text and the incremental Reader, which holds back incomplete characters, all follow from this rule.
Some tokenizers write the first token of a text differently, most of them without its leading space. A continuation is
decoded after its prompt, so that its text is what it adds to the text of the prompt.
"""
from __future__ import annotations

import json
import re
from codecs import IncrementalDecoder, getincrementaldecoder, register_error
from collections.abc import Iterable, Sequence
from functools import cached_property

from transformers import PreTrainedTokenizerBase

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
ESCAPED = range(0xDC80, 0xDD00)  # code points of "surrogateescape" for bytes that are not UTF-8
EACH_BYTE = "replace each byte"  # by U+FFFD, as SentencePiece does; "replace" does it once for a cut character
register_error(EACH_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end))


class TokenBytes:
    """What the tokens of a fast tokenizer stand for: their bytes, their names, and the text of several."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # those that decoding skips, which are not all that a configuration calls special
        self._special = frozenset(
            id for id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._spelled: dict[int, bytes] = {}
        self._pieces: dict[int, str] = {}

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> str:
        """The text that the ids add to that of `after`, without special tokens; U+FFFD replaces bytes that are not
        UTF-8.
        """
        reader = Reader(self, after)
        return reader.push(ids) + reader.flush()

    def piece(self, id: int) -> str:
        """A token for display: its exact text with `<0xE2>` for bytes that are not UTF-8, or its name if special."""
        if id not in self._pieces:
            self._pieces[id] = self._show(id)
        return self._pieces[id]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self.piece(id) for id in ids]

    def bytes(self, id: int) -> bytes:
        """The bytes a token adds after other tokens; none for special tokens and for ids without a token."""
        if id not in self._spelled:
            self._spelled[id] = b"" if id in self._special else self._spell(id)
        return self._spelled[id]

    def first_token_bytes(self, id: int) -> bytes:
        """The bytes of a token at the start of a text, where some tokenizers drop the leading space."""
        spelled = self.bytes(id)
        same = "ByteLevel" in self._decoders or not self.has_text([id]) or self._is_byte(id) and spelled != b" "
        return spelled if same else self._in_context([id]).encode()

    def utf8_decoder(self) -> IncrementalDecoder:
        """Decodes the bytes of tokens; what is not UTF-8 becomes U+FFFD, as often as with the tokenizer's decoder.

        A text that mixes the bytes of a whole character and stray ones keeps the character, as SentencePiece does; the
        library replaces a run of byte tokens as a whole, which no text that has been shown can follow.
        """
        return getincrementaldecoder("utf-8")(EACH_BYTE if "ByteFallback" in self._decoders else "replace")

    def has_text(self, ids: Iterable[int]) -> bool:
        """Whether decoding keeps any of the ids, so that a token after them is not the first one of a text."""
        return any(not self.is_special(id) and self._backend.id_to_token(id) is not None for id in ids)

    def names(self) -> dict[int, str]:
        """The tokenizer's own name of each token, by id."""
        return {id: name for name, id in self.tokenizer.get_vocab().items()}

    @property
    def begin(self) -> int | None:
        """The token that begins a text; None if the tokenizer has none."""
        return self.tokenizer.bos_token_id

    @property
    def padding(self) -> int | None:
        """The padding token; None if the tokenizer has none."""
        return self.tokenizer.pad_token_id

    def is_special(self, id: int) -> bool:
        """Whether decoding skips the token."""
        return id in self._special

    def _show(self, id: int) -> str:
        if id in self._special:
            return self._backend.id_to_token(id)
        if self._backend.id_to_token(id) is None:
            return f"<unused {id}>"
        text = self.bytes(id).decode("utf-8", "surrogateescape")
        return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if ord(c) in ESCAPED else c for c in text)

    def _spell(self, id: int) -> bytes:
        name = self._backend.id_to_token(id)
        if name is None:
            return b""
        if "ByteLevel" in self._decoders:
            return bytes(BYTES[c] for c in name) if all(c in BYTES for c in name) else name.encode()
        if self._is_byte(id):
            return bytes([int(name[3:5], 16)])
        # For any other decoder: the bytes that a second copy of the token adds to the first.
        return self._in_context([id, id]).removeprefix(self._in_context([id])).encode()

    def _is_byte(self, id: int) -> bool:
        """Whether the token is a single byte, such as `<0xE2>`, which may be no text by itself."""
        return "ByteFallback" in self._decoders and BYTE_TOKEN.fullmatch(self._backend.id_to_token(id)) is not None

    def _in_context(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """Types of the tokenizer's decoder steps, such as {"Replace", "ByteFallback", "Fuse"}."""
        decoder = self._backend.decoder
        steps = json.loads(decoder.__getstate__()) if decoder else {}
        return frozenset(step["type"] for step in steps.get("decoders", [steps]) if step)


class Reader:
    """Incremental decoder of a text that follows the ids `after`. The concatenated results of `push`, then `flush`,
    equal `tokens.decode` of all pushed ids after them.
    """

    def __init__(self, tokens: TokenBytes, after: Sequence[int] = ()):
        self._tokens = tokens
        self._decoder = tokens.utf8_decoder()
        self._follows = tokens.has_text(after)
        self._started = self._follows

    def piece(self, id: int) -> str:
        """A token for display."""
        return self._tokens.piece(id)

    def is_special(self, id: int) -> bool:
        """Whether decoding skips the token."""
        return self._tokens.is_special(id)

    def push(self, ids: Iterable[int]) -> str:
        """The text completed by these ids; bytes of an incomplete character are held back."""
        return "".join(self._decoder.decode(self._bytes(id)) for id in ids)

    def flush(self) -> str:
        """Bytes that were held back, as U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def copy(self) -> Reader:
        """An independent reader in the same state."""
        other = Reader(self._tokens)
        other._decoder.setstate(self._decoder.getstate())
        other._follows, other._started = self._follows, self._started
        return other

    def rebuild(self, ids: Iterable[int]) -> str:
        """Reset after a rollback, as if only these ids had been pushed; returns their text."""
        self._decoder.reset()
        self._started = self._follows
        return self.push(ids)

    def _bytes(self, id: int) -> bytes:
        if self._started or not self._tokens.has_text([id]):
            return self._tokens.bytes(id)
        self._started = True
        return self._tokens.first_token_bytes(id)


def _byte_characters() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary: printable ones as themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_characters()
