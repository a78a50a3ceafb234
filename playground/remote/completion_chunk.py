"""Reads one chunk of a streamed completion, of whichever server: text, log-probabilities, and reports of speculation.

Servers differ in what they send. vLLM and SGLang list log-probabilities of a text in parallel lists, llama.cpp and all
chat endpoints as objects under "content". llama.cpp adds "timings" with counts of draft tokens; OpenAI's interface has
counts of accepted and rejected predictions in "usage". What is missing or malformed is left out.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

UNKNOWN = -1  # id of a token that the server does not number
LOWEST = -1e4  # log-probabilities below it are those of impossible tokens


@dataclass(frozen=True)
class RemoteToken:
    """One token. top: the most probable tokens with their log-probabilities, best first; empty if not reported."""

    piece: str
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()
    id: int = UNKNOWN


@dataclass(frozen=True)
class DraftCounts:
    """Draft tokens of the whole answer, as the server counts them."""

    drafted: int
    accepted: int


@dataclass(frozen=True)
class CompletionChunk:
    """A part of the answer. tokens: those that spell `text`, or one that is the text where they do not."""

    text: str = ""
    tokens: tuple[RemoteToken, ...] = ()
    finish: str = ""  # "stop", "length", ...; empty before the end
    stop_string: bool = False  # the server names the stop string that ended the text
    counted: int | None = None  # tokens of the whole answer, as the server counts them
    drafts: DraftCounts | None = None
    error: str = ""


def read_chunk(data: Any) -> CompletionChunk:
    """Raises ValueError if `data` is no part of a completion."""
    if not isinstance(data, dict):
        raise ValueError("not an object")
    if data.get("error"):
        return CompletionChunk(error=_error(data["error"]))
    choices = data.get("choices")
    if not isinstance(choices, list):
        raise ValueError("no choices")
    choice = choices[0] if choices and isinstance(choices[0], dict) else {}
    text = _text(choice)
    return CompletionChunk(
        text,
        _spelling(text, _tokens(choice.get("logprobs"))),
        choice["finish_reason"] if isinstance(choice.get("finish_reason"), str) else "",
        isinstance(choice.get("stop_reason"), str),
        _count(_dict(data.get("usage")).get("completion_tokens")),
        _drafts(data),
    )


def _error(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message.strip() else "an error without a message"


def _text(choice: dict[str, Any]) -> str:
    """The text of either interface; the first chunk of a chat may have none."""
    said = _dict(choice.get("delta") or choice.get("message"))
    text = choice.get("text", said.get("content"))
    if text is not None and not isinstance(text, str):
        raise ValueError("a text that is not a string")
    return text or ""


def _spelling(text: str, tokens: list[RemoteToken]) -> tuple[RemoteToken, ...]:
    """The tokens if they spell the text. Otherwise, as for parts of a character, the text is shown as one token."""
    if "".join(token.piece for token in tokens) == text:
        return tuple(tokens)
    if not text:
        return ()
    only = tokens[0] if len(tokens) == 1 else RemoteToken(text)
    return (RemoteToken(text, only.logprob, only.top, only.id),)


def _tokens(logprobs: Any) -> list[RemoteToken]:
    given = _dict(logprobs)
    if isinstance(given.get("content"), list):
        return [_object_token(entry) for entry in given["content"] if isinstance(entry, dict)]
    pieces = given.get("tokens")
    if not isinstance(pieces, list) or not all(isinstance(piece, str) for piece in pieces):
        return []
    return [
        RemoteToken(piece, _logprob(_at(given.get("token_logprobs"), i)), _top(_at(given.get("top_logprobs"), i)))
        for i, piece in enumerate(pieces)
    ]


def _object_token(entry: dict[str, Any]) -> RemoteToken:
    piece, number = entry.get("token"), entry.get("id")
    top = entry.get("top_logprobs")
    pairs = [(one.get("token"), one.get("logprob")) for one in top if isinstance(one, dict)] if _is_list(top) else []
    return RemoteToken(
        piece if isinstance(piece, str) else "",
        _logprob(entry.get("logprob")),
        _ranked(pairs),
        number if type(number) is int and number >= 0 else UNKNOWN,
    )


def _top(found: Any) -> tuple[tuple[str, float], ...]:
    return _ranked(list(found.items())) if isinstance(found, dict) else ()


def _ranked(pairs: list[tuple[Any, Any]]) -> tuple[tuple[str, float], ...]:
    """Best first, without entries that are no piece with a log-probability."""
    usable = [(piece, _logprob(value)) for piece, value in pairs if isinstance(piece, str)]
    return tuple(sorted(((piece, value) for piece, value in usable if value is not None), key=lambda pair: -pair[1]))


def _logprob(value: Any) -> float | None:
    """A finite log-probability; rounding may have made it slightly larger than 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return min(float(value), 0.0) if LOWEST < value < 1e-3 else None


def _drafts(data: dict[str, Any]) -> DraftCounts | None:
    timings, details = _dict(data.get("timings")), _dict(_dict(data.get("usage")).get("completion_tokens_details"))
    drafted, accepted = _count(timings.get("draft_n")), _count(timings.get("draft_n_accepted"))
    if drafted is None:
        accepted, rejected = (_count(details.get(f"{name}_prediction_tokens")) for name in ("accepted", "rejected"))
        drafted = accepted + rejected if accepted is not None and rejected is not None else None
    possible = drafted and accepted is not None and accepted <= drafted
    return DraftCounts(drafted, accepted) if possible else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _at(column: Any, i: int) -> Any:
    return column[i] if isinstance(column, list) and i < len(column) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None
