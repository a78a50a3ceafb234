"""An index of texts that finds every occurrence of a context's suffixes, and the tokens that follow them.

It gives the counts of a suffix tree: c(w) is the number of occurrences of w, of which c(wv) continue with v. An
occurrence at the end of a text has no continuation but counts in c(w). Token positions are stored instead of a tree,
which would hold 64 nodes per token at depth 64. Oliaro et al. 2024, arXiv 2411.04975.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b

BREAK = -1  # precedes each text, so that no occurrence spans two texts


class SuffixIndex:
    """Texts, one after another, with the positions of every token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.starts: list[int] = []  # position of the BREAK before each text
        self._after: dict[int, list[int]] = {}  # positions right after each occurrence of a token

    def __deepcopy__(self, memo: dict) -> SuffixIndex:
        copy = SuffixIndex()
        copy.tokens, copy.starts = list(self.tokens), list(self.starts)
        copy._after = {token: list(places) for token, places in self._after.items()}
        return copy

    def begin(self) -> None:
        """Start a new text."""
        self.starts.append(len(self.tokens))
        self.tokens.append(BREAK)

    def add(self, tokens: list[int]) -> None:
        """Append tokens to the last text."""
        for token in tokens:
            self.tokens.append(token)
            self._after.setdefault(token, []).append(len(self.tokens))

    def keep_last(self, count: int) -> int:
        """Remove all texts but the last `count`; returns the number removed."""
        removed = len(self.starts) - count
        if removed <= 0:
            return 0
        remaining = self.tokens[self.starts[removed]:] if count else []
        self.tokens, self.starts, self._after = [], [], {}
        for token in remaining:
            self.begin() if token == BREAK else self.add([token])
        return removed

    def occurrences(self, context: list[int]) -> Iterator[tuple[int, list[int]]]:
        """Length of each suffix of a context that occurs, shortest first, and the positions after its occurrences."""
        places = self._after.get(context[-1], []) if context else []
        for length in range(1, len(context) + 1):
            if length > 1:
                # negative indices do not wrap around: the BREAK at position 0 ends the match first
                places = [place for place in places if self.tokens[place - length] == context[-length]]
            if not places:
                return
            yield length, places

    def followers(self, places: list[int]) -> dict[int, list[int]]:
        """The tokens at these positions, each with the positions after it."""
        found: dict[int, list[int]] = {}
        for place in places:
            if place < len(self.tokens) and self.tokens[place] != BREAK:
                found.setdefault(self.tokens[place], []).append(place + 1)
        return found

    def continuation(self, place: int, most: int, ends: Callable[[int], bool]) -> list[int]:
        """At most `most` tokens from a position on, up to an end token, which is included, or the end of the text."""
        found: list[int] = []
        for token in self.tokens[place:place + most]:
            if token == BREAK:
                break
            found.append(token)
            if ends(token):
                break
        return found

    def digest(self) -> str:
        """Hash of the stored texts."""
        return blake2b(repr(self.tokens).encode(), digest_size=8).hexdigest()


def frequent_prefixes(texts: list[list[int]], count: int) -> dict[tuple[int, ...], int]:
    """The `count` most frequent prefixes of texts and how often each occurs, in descending order.

    On ties the shorter comes first, then the one that occurs first. They form a trie: each follows its own prefixes.
    """
    counts = Counter(tuple(text[:end]) for text in texts for end in range(1, len(text) + 1))
    frequent = sorted(counts, key=lambda prefix: (-counts[prefix], len(prefix)))
    return {prefix: counts[prefix] for prefix in frequent[:count]}
