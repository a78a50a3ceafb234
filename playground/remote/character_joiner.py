"""Joins characters that a server sends in halves, one in each part of its answer.

A server that cuts its text at any byte sends the bytes of a character in several events, and one that cuts at any
UTF-16 unit the halves of a surrogate pair, as escapes in JSON. Neither half is a character that can be stored. Bytes
that are not UTF-8 are expected as "surrogateescape" reads them.
"""
from __future__ import annotations

import re

from playground.engine.text.token_bytes import ESCAPED

HIGH, LOW = "[\ud800-\udbff]", "[\udc00-\udfff]"
PAIR, LONE = re.compile(HIGH + LOW), re.compile("[\ud800-\udfff]")
BYTES = re.compile("[\udc80-\udcff]+")
LEADS = ((0xC2, 0xE0, 1), (0xE0, 0xF0, 2), (0xF0, 0xF5, 3))  # first bytes from, below, and how many follow


class CharacterJoiner:
    """The text of an answer, of which no part ends within a character; half of one at its very end is left out."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is complete with this part; half a character at its end is held back."""
        text = self._held + text
        end = len(text) - _incomplete(text)
        self._held = text[end:]
        return whole(text[:end])


def whole(text: str) -> str:
    """A text with its halves joined; U+FFFD replaces those that are alone."""
    if not LONE.search(text):
        return text
    joined = PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text)
    decoded = BYTES.sub(lambda run: run[0].encode("utf-8", "surrogateescape").decode("utf-8", "replace"), joined)
    return LONE.sub("\ufffd", decoded)


def _incomplete(text: str) -> int:
    """The number of code units at the end of a text that begin a character without ending it."""
    if re.search(HIGH + "$", text):
        return 1
    for count in (1, 2, 3):
        if count > len(text) or ord(text[-count]) not in ESCAPED:
            return 0
        byte = ord(text[-count]) - 0xDC00
        if byte >= 0xC0:
            return count if any(low <= byte < high and count <= more for low, high, more in LEADS) else 0
    return 0
