"""Text to token ids and back, so that what is shown while a text grows is what the whole text says in the end.

Every token stands for some bytes; a text is those bytes in order, read as UTF-8. From that one rule follow the piece
shown for a single token, the decoding of a whole text, and the Reader that decodes it bit by bit and holds back half a
letter.
"""
from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable
from functools import cached_property

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from playground.errors import Refusal

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
ESCAPED = range(0xDC80, 0xDD00)  # where "surrogateescape" puts bytes that are not UTF-8


class Tokens:
    """A fast tokenizer beside a model of `vocabulary` rows, which may be more than the tokenizer has tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int):
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self._backend = tokenizer.backend_tokenizer
        self._added = {id: token.content for id, token in self._backend.get_added_tokens_decoder().items()}
        self._silent = frozenset(tokenizer.all_special_ids) | {
            id for id, token in self._backend.get_added_tokens_decoder().items() if token.special}
        self._spelled: dict[int, bytes] = {}
        self._pieces: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with whatever the tokenizer puts around it; names of special tokens in the text become
        those tokens.
        """
        return self.tokenizer(text, verbose=False)["input_ids"]

    def encode_further(self, text: str) -> list[int]:
        """Ids of a text that goes on where another one stopped: nothing is put around it."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode_chat(self, user: str, system: str = "", before: Iterable[tuple[str, str]] = ()) -> list[int]:
        """Ids of one question, after earlier (user, assistant) turns, in the model's own chat form, up to where its
        answer begins; raises Refusal.
        """
        if not self.tokenizer.chat_template:
            raise Refusal("This model has no chat template: turn chat off and write the prompt as plain text.", "chat")
        messages = [{"role": "system", "content": system}] if system else []
        for asked, answered in before:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": user})
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except TemplateError as reason:
            advice = (
                "leave the system message empty"
                if system
                else "take the earlier turns away"
                if before
                else "turn chat off"
            )
            raise Refusal(
                f"The model's chat template does not take these messages ({reason}): {advice}.", "chat"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens left out; U+FFFD stands for bytes that are no letter."""
        reader = Reader(self)
        return reader.push(ids) + reader.flush()

    def piece(self, id: int) -> str:
        """What a screen shows for one token: its exact text, `<0xE2>` for bytes that are no whole letter, a special
        token's name.
        """
        if id not in self._pieces:
            self._pieces[id] = self._show(id)
        return self._pieces[id]

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self.piece(id) for id in ids]

    def bytes(self, id: int) -> bytes:
        """The bytes a token adds to a text that has begun; none for special tokens and for ids without a token."""
        if id not in self._spelled:
            self._spelled[id] = b"" if id in self._silent else self._spell(id)
        return self._spelled[id]

    def opening_bytes(self, id: int) -> bytes:
        """The bytes of a text's first token: some tokenizers drop the space there that they themselves put in front."""
        spelled = self.bytes(id)
        drops = spelled.startswith(b" ") and "ByteLevel" not in self._decoders
        return self._in_context([id]).encode() if drops else spelled

    def names(self) -> dict[int, str]:
        """What the tokenizer itself calls each token, by id."""
        return {id: name for name, id in self.tokenizer.get_vocab().items()}

    def is_special(self, id: int) -> bool:
        """Whether decoding leaves the token out."""
        return id in self._silent

    def _show(self, id: int) -> str:
        if id in self._silent:
            return self._backend.id_to_token(id)
        if self._backend.id_to_token(id) is None:
            return f"<unused {id}>"
        text = self.bytes(id).decode("utf-8", "surrogateescape")
        return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if ord(c) in ESCAPED else c for c in text)

    def _spell(self, id: int) -> bytes:
        name = self._backend.id_to_token(id)
        if name is None:
            return b""
        if id in self._added:
            return self._added[id].encode()
        if "ByteLevel" in self._decoders:
            return bytes(BYTES[letter] for letter in name) if all(letter in BYTES for letter in name) else name.encode()
        if "ByteFallback" in self._decoders and (byte := BYTE_TOKEN.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        # No other decoder is worth knowing by name: what a token adds is what its second copy adds to its first.
        return self._in_context([id, id]).removeprefix(self._in_context([id])).encode()

    def _in_context(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """Names of the steps by which the tokenizer turns tokens into text, {"Replace", "ByteFallback", "Fuse"}."""
        decoder = self._backend.decoder
        steps = json.loads(decoder.__getstate__()) if decoder else {}
        return frozenset(step["type"] for step in steps.get("decoders", [steps]) if step)


class Reader:
    """Reads a growing text. All that `push` returned, with `flush` at the end, is `tokens.decode` of all ids."""

    def __init__(self, tokens: Tokens):
        self._tokens = tokens
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._begun = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that became readable with these ids; bytes of a letter that is not complete wait."""
        return "".join(self._decoder.decode(self._bytes(id)) for id in ids)

    def flush(self) -> str:
        """What still waited, as U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def copy(self) -> Reader:
        """A reader at the same place that goes its own way."""
        twin = Reader(self._tokens)
        twin._decoder.setstate(self._decoder.getstate())
        twin._begun = self._begun
        return twin

    def rebuild(self, ids: Iterable[int]) -> str:
        """Start over as if only these ids had been pushed, after tokens were taken back; returns their readable text.
        """
        self._decoder.reset()
        self._begun = False
        return self.push(ids)

    def _bytes(self, id: int) -> bytes:
        if self._begun or self._tokens.is_special(id):
            return self._tokens.bytes(id)
        self._begun = True
        return self._tokens.opening_bytes(id)


def _byte_letters() -> dict[str, int]:
    """The byte each letter of a byte-level vocabulary stands for: printable ones for themselves, the others from U+0100
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_letters()
