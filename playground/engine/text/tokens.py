"""Text to token ids: prompts, continuations and chats."""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from playground.engine.text.chat_prompt import written
from playground.engine.text.thinking_tags import Tags, read_tags
from playground.engine.text.token_bytes import TokenBytes
from playground.engine.text.tool_call_format import CallFormat, describes_tools, read_format
from playground.errors import Refusal
from playground.request_limits import quoted

ANCHORS = "\n", "a"  # a text is encoded after one of them if the tokenizer treats the start of a text differently


class Tokens(TokenBytes):
    """A fast tokenizer for a model with `vocabulary` logits, which may exceed the number of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int):
        super().__init__(tokenizer)
        self.vocabulary = vocabulary

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

    def thinking_tags(self) -> Tags | None:
        """The start and the end tag of the model's thinking, if it has some that are known."""
        return read_tags(self.tokenizer)

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
