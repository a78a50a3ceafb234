"""Texts one after another, and what followed wherever they hold the ending of another text.

It answers what a suffix tree with counts answers: c(w) is how often w occurs, and of those occurrences c(wv) go on with
v. One at the very end of a text goes on with nothing and counts all the same. In place of a tree it keeps where each
token stands: a tree 64 tokens deep would hold 64 nodes for every token. Oliaro et al. 2024, arXiv 2411.04975.
"""
from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

BREAK = -1  # stands before each text, so that no occurrence reaches from one into another


class Suffixes:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.starts: list[int] = []  # where the BREAK before each text stands
        self._after: dict[int, list[int]] = {}  # places right after each occurrence of a token

    def __deepcopy__(self, memo: dict) -> Suffixes:
        copy = Suffixes()
        copy.tokens, copy.starts = list(self.tokens), list(self.starts)
        copy._after = {token: list(places) for token, places in self._after.items()}
        return copy

    def begin(self) -> None:
        """What is added from now on is another text."""
        self.starts.append(len(self.tokens))
        self.tokens.append(BREAK)

    def add(self, tokens: list[int]) -> None:
        """More of the text that was begun last."""
        for token in tokens:
            self.tokens.append(token)
            self._after.setdefault(token, []).append(len(self.tokens))

    def only_last(self, count: int) -> int:
        """Forget all texts but the last `count`; returns how many went."""
        gone = len(self.starts) - count
        if gone <= 0:
            return 0
        left = self.tokens[self.starts[gone]:] if count else []
        self.tokens, self.starts, self._after = [], [], {}
        for token in left:
            self.begin() if token == BREAK else self.add([token])
        return gone

    def occurrences(self, context: list[int]) -> Iterator[tuple[int, list[int]]]:
        """For the last 1, 2, ... tokens of a context, as long as they occur: their number, and the places right after
        each occurrence.
        """
        places = self._after.get(context[-1], []) if context else []
        for length in range(1, len(context) + 1):
            if length > 1:
                # a BREAK comes before any wrap
                places = [place for place in places if self.tokens[place - length] == context[-length]]
            if not places:
                return
            yield length, places

    def followers(self, places: list[int]) -> dict[int, list[int]]:
        """The tokens at these places, and the places after them."""
        found: dict[int, list[int]] = {}
        for place in places:
            if place < len(self.tokens) and self.tokens[place] != BREAK:
                found.setdefault(self.tokens[place], []).append(place + 1)
        return found

    def digest(self) -> str:
        return blake2b(repr(self.tokens).encode(), digest_size=8).hexdigest()
