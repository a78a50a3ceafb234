"""The thinking parts of a text: what stands between the tags that a lane's header names, tags included.

assets/scripts/components/thinking.js finds the same parts on the page. Imports neither torch nor gradio.
"""
from __future__ import annotations

import re
from bisect import bisect_right
from codecs import getincrementaldecoder
from itertools import accumulate
from typing import NamedTuple

from playground.events import Header
from playground.trace.transcript import Written

BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class ThinkingSpan(NamedTuple):
    """Generated tokens from `first` up to `end`, which is not among them."""

    first: int
    end: int
    closed: bool  # its end tag is there


def thinking_parts(header: Header, pieces: list[str]) -> list[ThinkingSpan]:
    """The thinking parts of a generated text, given the pieces of its tokens.

    Tags are compared with the pieces, so a tag may be one special token or several tokens. A prompt that leaves a part
    open begins one with the first token. With an empty start tag the text begins with its only part, and has none
    until the end tag is there.
    """
    start, end = header.thinking if len(header.thinking) == 2 else ("", "")
    if not end:
        return []
    text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
    begun, inside = (0, 0) if not start or _left_open(header, start, end) else _next(text, start, 0)
    found: list[ThinkingSpan] = []
    while 0 <= begun < len(text):
        at = text.find(end, inside)
        first = max(bisect_right(ends, begun), found[-1].end if found else 0)
        if at < 0:
            return [*found, ThinkingSpan(first, len(pieces), False)] if start else found
        after = at + len(end)
        found.append(ThinkingSpan(first, bisect_right(ends, after - 1) + 1, True))
        begun, inside = _next(text, start, after) if start else (-1, -1)
    return found


def thinking_and_answer(header: Header, written: Written) -> tuple[str, str]:
    """The readable text of the thinking parts without their tags, and the text outside them."""
    parts = thinking_parts(header, [token.piece or "" for token in written.tokens])
    ends = [0, *_readable_ends(written)]
    thoughts, answer, place = [], "", 0
    for part in parts:
        from_, to = ends[part.first], ends[part.end]
        thoughts.append(_without_tags(written.text[from_:to], *header.thinking))
        answer, place = answer + written.text[place:from_], to
    return "".join(thoughts), answer + written.text[place:]


def _next(text: str, start: str, place: int) -> tuple[int, int]:
    """Where the next start tag begins and ends; -1 twice if there is none."""
    at = text.find(start, place)
    return (at, at + len(start)) if at >= 0 else (-1, -1)


def _left_open(header: Header, start: str, end: str) -> bool:
    """Whether the prompt ends inside a thinking part, as some chat templates let it."""
    prompt = "".join(header.prompt_pieces)
    return prompt.rfind(start) > prompt.rfind(end)


def _without_tags(text: str, start: str, end: str) -> str:
    return text.partition(end)[0].removeprefix(start)


def _readable_ends(written: Written) -> list[int]:
    """For each token, how many characters of the readable text there are after it; special tokens add none."""
    decoder, place, found = getincrementaldecoder("utf-8")("replace"), 0, []
    for token in written.tokens:
        shown = decoder.decode(_bytes_of(token.piece or ""))
        # a tokenizer may drop the blank before the first word of a text
        shown = shown.lstrip(" ") if not place and not written.text.startswith(" ") else shown
        if written.text.startswith(shown, place):
            place += len(shown)
        found.append(place)
    return found


def _bytes_of(piece: str) -> bytes:
    """The bytes of a piece, in which `<0xE2>` stands for a byte that is no character by itself."""
    parts = BYTE.split(piece)
    return b"".join(
        bytes.fromhex(part) if i % 2 else part.encode(errors="replace") for i, part in enumerate(parts)
    )
