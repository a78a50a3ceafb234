"""What is to know about a prompt that can be run and yet may not be what was meant: sentences shown beside it."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from playground.engine.text.chat_template import Chat, render
from playground.engine.text.tokens import Tokens
from playground.errors import Refusal

ANSWER = "answer0text"
NAMED = 5  # special tokens that a remark names


class Read(Protocol):
    """The model that reads a prompt."""

    name: str
    tokens: Tokens

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""


def remarks_on(model: Read, texts: Iterable[str], ids: list[int], chat: bool) -> list[str]:
    """Remarks on a prompt: `texts` are what people wrote, `ids` what the model reads."""
    texts = list(texts)
    found = [*_special_tokens(model.tokens, texts), *_begin_token(model.tokens, ids, chat)]
    found += _end_token(model, texts, ids, chat)
    return [*found, *_end_of_answers(model)] if chat else found


def _special_tokens(tokens: Tokens, texts: Iterable[str]) -> Iterator[str]:
    ids = dict.fromkeys(id for text in texts if text for id in tokens.encode_continuation(text))
    if names := [tokens.piece(id) for id in ids if tokens.is_special(id)]:
        more = " and others" if len(names) > NAMED else ""
        one = len(names) == 1
        yield (
            f"The text holds {', '.join(names[:NAMED])}{more}, which the model reads as "
            f"{'a special token' if one else 'special tokens'}, not as text."
        )


def _begin_token(tokens: Tokens, ids: list[int], chat: bool) -> Iterator[str]:
    begin = tokens.begin
    if begin is None or ids[:2] != [begin, begin]:
        return
    cause = "the chat template writes one as well" if chat else "the tokenizer adds one: leave it out of the text"
    yield f"The prompt begins with two begin tokens, {tokens.piece(begin) * 2}; {cause}."


def _end_token(model: Read, texts: list[str], ids: list[int], chat: bool) -> Iterator[str]:
    if not ids or ids[-1] not in model.end_ids:
        return
    name, cause = model.tokens.piece(ids[-1]), "chat template" if chat else "tokenizer"
    if not any(text.rstrip().endswith(name) for text in texts):
        yield f"The {cause} ends the prompt with {name}, which ends a text: the model may begin another one after it."


def _end_of_answers(model: Read) -> Iterator[str]:
    end = _answer_end(model.tokens)
    if end is None or not model.end_ids or end in model.end_ids:
        return
    name, ends = model.tokens.piece(end), ", ".join(model.tokens.pieces(sorted(model.end_ids)))
    yield (
        f"The chat template ends an answer with {name}, and a text of {model.name} ends with {ends}: it may be a base "
        f"model, whose answers go on. Set {name} as a stop string to end them there."
    )


def _answer_end(tokens: Tokens) -> int | None:
    """The special token with which the chat template ends an answer; None if it ends it otherwise."""
    text = _after_answer(tokens.tokenizer)
    ids = tokens.encode_continuation(text) if text else []
    return ids[0] if ids and tokens.is_special(ids[0]) else None


def _after_answer(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the template writes after an answer, without white space; empty if it does not write answers as texts."""
    messages = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": ANSWER}]
    try:
        (whole,) = render(tokenizer, Chat(messages, answer=False))
    except Refusal:  # a template that works for the prompt may not do so here
        return ""
    return whole.text.partition(ANSWER)[2].strip()
