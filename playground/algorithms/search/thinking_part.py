"""The thinking part of a text that grows, for strategies that act on it."""
from __future__ import annotations

from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Iterator
from typing import TYPE_CHECKING

from playground.events import Event, Figure, Note

if TYPE_CHECKING:
    from playground.contract import Lane


class ThinkingPart:
    """Whether the text is inside its thinking part, and how many tokens that has. Tags are compared with the pieces of
    tokens, which for a special token is its name. `used` counts the tokens after the start tag.
    """

    def __init__(self, lm: Lane, start: str, end: str):
        self._lm, self._start, self._end = lm, start, end
        prompt = "".join(map(lm.piece, lm.tokens[:lm.prompt_length]))
        self.opened = not start or prompt.rfind(start) > prompt.rfind(end)
        self.used = self.waits = 0  # tokens of the part, and end tags that were replaced
        self._text, self._ends = "", []  # of the generated tokens: their pieces, and where each ends
        self._first = 0  # token of the part, its start tag included
        self._since = 0  # characters up to the last tag
        self._bytes = getincrementaldecoder("utf-8")("ignore")
        for token in lm.tokens[lm.prompt_length:]:  # a fork of a run begins with given tokens
            self._append(token)

    @property
    def inside_character(self) -> bool:
        """Whether the last token ends inside the bytes of a character."""
        return bool(self._bytes.getstate()[0])

    def follow(self, token: int) -> Iterator[Event]:
        """A token is committed next: shade it, and say how long the part was if it ends here."""
        place, opened = len(self._ends), self.opened
        self._append(token)
        thinks = opened or self.opened  # the tags are of the part
        span = [place, place + 1, "thinking" if thinks else "answer", float(thinks)]
        yield Figure("spans", "thinking", {"spans": [span], "shades": True})
        if opened and not self.opened:
            yield Note(f"The thinking part has {len(self._ends) - self._first} tokens, its tags included.")

    def _append(self, token: int) -> None:
        self._text += self._lm.piece(token)
        self._ends.append(len(self._text))
        self._bytes.decode(self._lm.bytes(token))
        self.used += self.opened
        tag = self._end if self.opened else self._start
        if tag and tag in self._text[self._since:]:
            if not self.opened:
                self._first = bisect_right(self._ends, self._text.index(tag, self._since))
            self.opened, self._since = not self.opened, len(self._text)
            self.used = self.waits = 0

    def closes_with(self, token: int) -> bool:
        """Whether this token would complete the end tag."""
        return self._end in (self._text + self._lm.piece(token))[self._since:]

    def take_tag_back(self) -> int:
        """Forget the tokens of an end tag that was begun; returns how many."""
        begun = max(i for i in range(len(self._end)) if self._text.endswith(self._end[:i]))
        kept = bisect_right(self._ends, len(self._text) - begun) if begun else len(self._ends)
        count = len(self._ends) - kept
        del self._ends[kept:]
        self._text, self.used = self._text[:self._ends[-1] if self._ends else 0], self.used - count
        return count
