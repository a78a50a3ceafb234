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

from playground.engine.text.chat_prompt import written
from playground.engine.text.tool_call_format import CallFormat, describes_tools, read_format
from playground.errors import Refusal
from playground.request_limits import quoted

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
ANCHORS = "\n", "a"  # a text is encoded after one of them if the tokenizer treats the start of a text differently
ESCAPED = range(0xDC80, 0xDD00)  # code points of "surrogateescape" for bytes that are not UTF-8
EACH_BYTE = "replace each byte"  # by U+FFFD, as SentencePiece does; "replace" does it once for a cut character
register_error(EACH_BYTE, lambda error: ("\ufffd" * (error.end - error.start), error.end))


class Tokens:
    """A fast tokenizer for a model with `vocabulary` logits, which may exceed the number of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int):
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self._backend = tokenizer.backend_tokenizer
        # those that decoding skips, which are not all that a configuration calls special
        self._special = frozenset(
            id for id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._spelled: dict[int, bytes] = {}
        self._pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the special tokens the tokenizer adds. Names of special tokens become those tokens.

        Every text that a model reads becomes ids here or in `_encode_rendered`; both raise Refusal for a token that
        the network has no embedding of.
        """
        return self._embedded(self.tokenizer(text, verbose=False)["input_ids"])

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of a text that continues another one, without added special tokens.

        Some tokenizers put a space before the first word of a text: it is encoded after an anchor then, so that the
        ids add exactly this text. They do not where the tokenizer changes letters, as those that lowercase do.
        """
        plain = self._encode_rendered(text)
        if self._spells(plain, text):
            return plain
        for anchor in ANCHORS:
            before, both = self._encode_rendered(anchor), self._encode_rendered(anchor + text)
            if both[:len(before)] == before and self._spells(both[len(before):], text):
                return both[len(before):]
        return plain

    def _encode_rendered(self, text: str) -> list[int]:
        """Ids of a text that has its special tokens, as a chat template writes it, and is nothing's continuation."""
        return self._embedded(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _embedded(self, ids: list[int]) -> list[int]:
        """The ids. Raises Refusal for one beyond the network's embeddings: a tokenizer may have more tokens."""
        if (highest := max(ids, default=0)) >= self.vocabulary:
            raise Refusal(
                f"The text has {quoted(self.piece(highest))} in it, token {highest:,} of the tokenizer, and this "
                f"network has embeddings of {self.vocabulary:,} tokens: remove it, or choose another model.",
                "prompt",
            )
        return ids

    def _spells(self, ids: list[int], text: str) -> bool:
        """Whether ids are exactly this text, names of special tokens included."""
        spelled = (self.piece(id).encode() if id in self._special else self.bytes(id) for id in ids)
        return b"".join(spelled) == text.encode(errors="replace")

    def spell(self, text: str) -> list[int]:
        """Ids of a text that continues another one; what the vocabulary cannot write is left out.

        Names of special tokens become those tokens, as in a prompt.
        """
        return [id for id in self.encode_continuation(text) if not self._unknown(id, text)]

    def can_spell(self, text: str) -> bool:
        """Whether the text has ids, and none of them is the unknown token."""
        ids = self.encode_continuation(text)
        return bool(ids) and not any(self._unknown(id, text) for id in ids)

    def special_in(self, text: str) -> str:
        """The first special token that is named in a text; empty if none is."""
        return next((self.piece(id) for id in self.encode_continuation(text) if self.is_special(id)), "")

    def check_is_text(self, text: str, about: str) -> None:
        """Raise Refusal for a string that is searched in the text and has the name of a special token in it."""
        if name := self.special_in(text):
            raise Refusal(
                f"In {quoted(text)}, {name} is a special token of this model, which is no text and is never found in "
                "it: use a string that the model writes as text.",
                about,
            )

    def _unknown(self, id: int, text: str) -> bool:
        """Whether an id stands for characters of this text that no token has. Some tokenizers use the end token."""
        return id == self.tokenizer.unk_token_id and self.tokenizer.unk_token not in text

    def encode_chat(
        self, user: str, system: str = "", before: Iterable[tuple[str, str]] = (), tools: str = ""
    ) -> list[int]:
        """Ids of a user message after earlier (user, assistant) turns, in the model's chat template, which describes
        the tools, a list in JSON.

        They end where the answer begins. Raises Refusal if there is no template, or if it rejects or leaves out
        a message or a tool.
        """
        messages = [{"role": "system", "content": system}] if system else []
        for asked, answered in before:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": user})
        if tools:
            self.check_tools()
        text = written(self.tokenizer, messages, json.loads(tools) if tools else None)
        return self._encode_rendered(text)

    def check_tools(self) -> None:
        """Raise Refusal unless the chat template describes tools."""
        if not describes_tools(self.tokenizer):
            raise Refusal(
                "This model's chat template has no place for tools: describe them in the prompt, or choose another "
                "model.",
                "tools",
            )

    def call_format(self) -> CallFormat | None:
        """The form of a tool call in the model's chat template, if it has one that is recognised."""
        return read_format(self.tokenizer)

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

    def check_constrainable(self, prompt: Sequence[int]) -> None:
        """Raise Refusal for a prompt after which constraints would read another text than people do.

        Constraints follow the bytes that tokens add to a text, which some tokenizers write differently at its start.
        """
        if self.has_text(prompt) or all(
            self.first_token_bytes(id) == self.bytes(id) for id in range(self.vocabulary)
        ):
            return
        raise Refusal(
            "The prompt consists of special tokens only, and this model's tokenizer changes the first word of a text, "
            "which constraints cannot follow: write some words in the prompt, or remove the constraint.",
            "prompt",
        )

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

    def __init__(self, tokens: Tokens, after: Sequence[int] = ()):
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
