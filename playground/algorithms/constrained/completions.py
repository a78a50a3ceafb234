"""Looks ahead in a grammar: is there a text that goes on from here, is complete, and satisfies a check as well?

A grammar says what may follow; a check beside it may turn down every text that does. The search goes through the
grammar byte by byte, the cheapest continuation first: closing what is open costs nothing, an item or a value of
the schema one, any other byte two or more. It is bounded, so it may not know; where it has seen everything there is no
text.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from playground.grammar.byte_matcher import ByteMatcher

CLOSING = {ord('"'): 0.0, ord("]"): 0.0, ord("}"): 0.0, ord(","): 1.0, ord(" "): 1.0, ord("["): 1.5, ord("{"): 1.5}
OTHER, STEP = 2.0, 0.1  # costs of any other byte: of the first one, and what each one after it costs more
WORD = 1.0
BEGINS_VALUE = (b"[", b"{", b", ", b": ")
STATES = 60  # states of a search
REMEMBERED = 64  # complete texts, and beginnings that were turned down


class Completions:
    """Searches the complete texts of a grammar that a check does not turn down.

    `verdict` is True, False or None (not yet) for a text; False is final, whatever follows. `words` are values and keys
    that are tried as a whole, which is where a schema speaks of them.
    """

    def __init__(self, start: ByteMatcher, verdict: Callable[[bytes], bool | None], words: list[bytes]):
        self._start, self._verdict, self._words = start, verdict, words
        self._known: deque[bytes] = deque(maxlen=REMEMBERED)
        self.rejected: deque[bytes] = deque(maxlen=REMEMBERED)  # what the check turned down in the last search
        self._last: tuple[bytes, ByteMatcher] = (b"", start)

    def possible(self, text: bytes, states: int = STATES) -> bool:
        """False if no complete text begins so; True if one does, or if that is not known after so many states."""
        return any(known.startswith(text) for known in self._known) or self._search(text, states)

    def at(self, text: bytes) -> ByteMatcher | None:
        """The grammar after a text; None where it does not allow the text."""
        before, matcher = self._last if text.startswith(self._last[0]) else (b"", self._start)
        return matcher.after(text[len(before):])

    def move(self, text: bytes) -> None:
        """Keep the state after a text: what is asked next begins so."""
        if (found := self.at(text)) is not None:
            self._last = text, found

    def _search(self, text: bytes, states: int) -> bool:
        start = self.at(text)
        if start is None:
            return True  # bytes that the grammar reads otherwise, which is not for the check to say
        waiting: list[tuple[float, bytes]] = [(0.0, b"")]
        seen: set[bytes] = set()
        self.rejected.clear()
        while waiting:
            cost, more = heappop(waiting)
            if more in seen:
                continue
            seen.add(more)
            if len(seen) > states:
                return True
            matcher = start.after(more)
            verdict = self._verdict(text + more)
            if matcher is None or verdict is False:
                self.rejected.append(text + more)
                continue
            if matcher.accepting and verdict is True:
                self._known.append(text + more)
                return True
            for added, price in self._next(matcher, text + more):
                heappush(waiting, (cost + price, more + added))
        return False

    def _next(self, matcher: ByteMatcher, text: bytes) -> Iterator[tuple[bytes, float]]:
        """What may be added to a text, and what it costs."""
        if forced := matcher.forced():
            yield forced, 0.0
            return
        if text.endswith(BEGINS_VALUE):
            yield from ((word, WORD + STEP * i) for i, word in enumerate(self._words) if matcher.allows(word))
        others = 0
        for byte in matcher.following():
            price = CLOSING.get(byte, OTHER + STEP * others)
            others += byte not in CLOSING
            yield bytes([byte]), price
