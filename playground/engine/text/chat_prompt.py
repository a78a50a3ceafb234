"""The messages of a chat as the text that a model reads, in its chat template.

A template may leave out what it is given, in silence: many expect the content of a message as a list of parts, some
have no place for a system message. So each message is looked for in the text, and a chat with markers in place of its
messages is rendered beside it, since a short message is found in any text.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from playground.engine.text.chat_template import Chat, Message, Rendering, render
from playground.errors import Refusal
from playground.request_limits import quoted

MARKER = "given{}text"
TAG = re.compile(r"</?[\w|]+>|<\|[^<>|]*\|>|\[/?[A-Z_]+\]")  # after the last one of an answer its thoughts are over
Tools = list[dict[str, Any]]


def written(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools | None = None, answer: bool = True
) -> str:
    """The text of messages, with `answer` up to where the next answer begins. Raises Refusal if the template rejects or
    leaves out any.

    Messages are {"role", "content": text}. Where the template does not write them so, they are given as lists of parts.
    """
    reasons = []
    for form in (_as_text, _as_parts):
        whole, probe = (
            Chat([{**message, "content": form(text)} for message, text in zip(messages, texts)], tools, answer)
            for texts in ([message["content"] for message in messages], _markers(messages))
        )
        text, marked = render(tokenizer, whole, probe)
        reason = _refusal(text, messages, tools) if text.reason else _left_out(text, marked, messages, tools)
        if reason is None:
            return text.text
        reasons.append(reason)
    raise reasons[0]


def _as_text(content: str) -> str:
    return content


def _as_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _markers(messages: Sequence[Message]) -> list[str]:
    return [MARKER.format(place) if message["content"].strip() else "" for place, message in enumerate(messages)]


def _refusal(text: Rendering, messages: Sequence[Message], tools: Tools | None) -> Refusal:
    """Of a chat that the template does not write."""
    if tools:
        return Refusal(
            f"The model's chat template does not accept these messages and tools ({text.reason}): write the tools as "
            "for a chat API, or remove them.",
            "tools",
        )
    if text.failed:
        return Refusal(
            f"The model's chat template does not work ({text.failed}): turn chat off, or choose another model.", "chat"
        )
    earlier = len(messages) > 1 + (messages[0]["role"] == "system")
    advice = "remove the earlier turns" if earlier else "turn chat off"
    if messages[0]["role"] == "system":
        advice = "leave the system message empty"
    return Refusal(f"The model's chat template does not accept these messages ({text.refused}): {advice}.", "chat")


def _left_out(text: Rendering, marked: Rendering, messages: Sequence[Message], tools: Tools | None) -> Refusal | None:
    """The refusal for the first message or tool that is not in the text; None if all are."""
    within = _squeezed(text.text)
    for place, (message, marker) in enumerate(zip(messages, _markers(messages))):
        marked_there = bool(marked.reason) or _is_written(marker, marked.text)
        if marker and not (marked_there and any(said in within for said in _spellings(message))):
            return _missing(message, place == len(messages) - 1)
    return next((_missing_tool(*names) for names in _names_of_tools(tools or ())
                 if not any(said in within for said in _escapes(names[-1]))), None)


def _names_of_tools(tools: Tools) -> Iterator[tuple[str, ...]]:
    """The name of each tool, and with it that of each of its parameters."""
    for tool in tools:
        described = tool.get("function", tool)
        yield (described["name"],)
        parameters = described.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        yield from ((described["name"], name) for name in (properties if isinstance(properties, dict) else ()))


def _missing_tool(name: str, parameter: str = "") -> Refusal:
    said = f"the parameter {quoted(parameter)} of the tool" if parameter else "the tool"
    return Refusal(
        f"The model's chat template leaves out {said} {quoted(name)}: remove it, or describe it in the prompt.", "tools"
    )


def _is_written(marker: str, text: str) -> bool:
    """Whether a message is in the text, and not as the Python list that a template has made of its parts."""
    return marker in text and not re.search(f"""['"]text['"]: ['"]{marker}""", text)


def _spellings(message: Message) -> Iterator[str]:
    """How a template may write a message. Of an earlier answer many leave out its thoughts."""
    yield from _escapes(message["content"])
    if message["role"] == "assistant":
        parts = [part for part in TAG.split(message["content"]) if part.strip()]
        yield from _escapes(parts[-1]) if parts else ("",)


def _escapes(text: str) -> Iterator[str]:
    """A text as it is, and as JSON."""
    yield _squeezed(text)
    for is_ascii in (False, True):
        yield _squeezed(json.dumps(text, ensure_ascii=is_ascii)[1:-1])


def _squeezed(text: str) -> str:
    """Without white space, which templates strip and add."""
    return "".join(text.split())


def _missing(message: Message, is_last: bool) -> Refusal:
    if message["role"] == "system":
        return Refusal(
            "The model's chat template has no place for a system message: leave it empty, or put it in the prompt.",
            "system",
        )
    if is_last:
        return Refusal(
            "The model's chat template leaves out the prompt: turn chat off, or choose another model.", "chat"
        )
    said = "the answer" if message["role"] == "assistant" else "the message"
    return Refusal(
        f"The model's chat template leaves out {said} {quoted(message['content'])} of an earlier turn: remove the "
        "earlier turns, or put what they say in the prompt.",
        "before",
    )
