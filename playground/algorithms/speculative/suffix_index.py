"""An index of texts that finds every occurrence of a context's suffixes, and the tokens that follow them.

It gives the counts of a suffix tree: c(w) is the number of occurrences of w, of which c(wv) continue with v. An
occurrence at the end of a text has no continuation but counts in c(w). Token positions are stored instead of a tree,
which would hold 64 nodes per token at depth 64; large sets of positions are narrowed by array operations. Oliaro et
al. 2024, arXiv 2411.04975.
"""
from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy

BREAK = -1  # precedes each text, so that no occurrence spans two texts
FEW = 32  # positions up to which a loop is faster than array operations


class TokenLog:
    """Tokens in the order they were read, and the positions after each occurrence of a token. It only grows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._numbers = numpy.empty(1024, dtype=numpy.int64)  # the same tokens
        self._after: dict[int, array] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        start, end = len(self.tokens), len(self.tokens) + len(tokens)
        if end > len(self._numbers):
            self._numbers = numpy.concatenate([self._numbers, numpy.empty(end, dtype=numpy.int64)])
        self._numbers[start:end] = tokens
        self.tokens.extend(tokens)
        for place, token in enumerate(tokens, start + 1):
            if token not in self._after:
                self._after[token] = array("q")
            self._after[token].append(place)

    def numbers(self, end: int) -> numpy.ndarray:
        return self._numbers[:end]

    def after(self, token: int, start: int, end: int) -> numpy.ndarray:
        """Positions right after the occurrences of a token among those from `start` to `end`, ascending."""
        places = self._after.get(token, array("q"))
        return numpy.array(places[bisect_right(places, start):bisect_right(places, end)], dtype=numpy.int64)


class ManyPlaces(Sequence):
    """More than FEW positions in an index, ascending; fewer are in a list."""

    def __init__(self, positions: numpy.ndarray):
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return _places(self.positions[index]) if isinstance(index, slice) else int(self.positions[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None


def _places(positions: numpy.ndarray) -> Sequence[int]:
    return ManyPlaces(positions) if len(positions) > FEW else positions.tolist()


class SuffixIndex:
    """Texts, one after another, with the positions of every token.

    A copy shares what was read so far, and so do the runs of a visitor that begin with one memory: the first of them
    that adds tokens extends the shared log, others copy it.
    """

    def __init__(self) -> None:
        self._log = TokenLog()
        self._begin = self._end = 0  # the part of the log that belongs to this index
        self.starts: list[int] = []  # position of the BREAK before each text

    def __deepcopy__(self, memo: dict) -> SuffixIndex:
        copy = SuffixIndex()
        copy._log, copy._begin, copy._end, copy.starts = self._log, self._begin, self._end, list(self.starts)
        return copy

    @property
    def tokens(self) -> list[int]:
        """The log up to the last token of this index. Positions count from its start."""
        return self._log.tokens if self._end == len(self._log.tokens) else self._log.tokens[:self._end]

    def begin(self) -> None:
        """Start a new text."""
        self.starts.append(self._end)
        self._extend([BREAK])

    def add(self, tokens: list[int]) -> None:
        """Append tokens to the last text."""
        if tokens:
            self._extend(tokens)

    def _extend(self, tokens: list[int]) -> None:
        if self._end < len(self._log.tokens):  # another copy has extended the log
            self._move(TokenLog())
        self._log.extend(tokens)
        self._end += len(tokens)

    def _move(self, log: TokenLog) -> None:
        """Copy the texts of this index to an empty log."""
        log.extend(self._log.tokens[self._begin:self._end])
        self.starts = [start - self._begin for start in self.starts]
        self._log, self._begin, self._end = log, 0, len(log.tokens)

    def keep_last(self, count: int) -> int:
        """Remove all texts but the last `count`; returns the number removed."""
        removed = len(self.starts) - count
        if removed <= 0:
            return 0
        self._begin = self.starts[removed] if count else self._end
        self.starts = self.starts[removed:]
        if self._begin > self._end // 2:  # so that memory is bounded, and each token is moved once on average
            self._move(TokenLog())
        return removed

    def occurrences(self, context: list[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Length of each suffix of a context that occurs, shortest first, and the positions after its occurrences."""
        if not context:
            return
        places = _places(self._log.after(context[-1], self._begin, self._end))
        for length in range(1, len(context) + 1):
            if length > 1:
                places = self._preceded(places, length, context[-length])
            if not places:
                return
            yield length, places

    def _preceded(self, places: Sequence[int], length: int, token: int) -> Sequence[int]:
        """The places whose suffix of `length` tokens begins with a token. The BREAK before a text ends every match."""
        if isinstance(places, ManyPlaces):
            return _places(places.positions[self._log.numbers(self._end)[places.positions - length] == token])
        tokens = self._log.tokens
        return [place for place in places if tokens[place - length] == token]

    def followers(self, places: Sequence[int]) -> dict[int, Sequence[int]]:
        """The tokens at these positions, each with the positions after it."""
        if isinstance(places, ManyPlaces):
            return self._grouped(places.positions)
        found: dict[int, list[int]] = {}
        for place in places:
            if place < self._end and self._log.tokens[place] != BREAK:
                found.setdefault(self._log.tokens[place], []).append(place + 1)
        return found

    def _grouped(self, places: numpy.ndarray) -> dict[int, Sequence[int]]:
        """`followers` of many positions, in the same order: that of their first occurrences."""
        places = places[:bisect_left(places, self._end)]
        tokens = self._log.numbers(self._end)[places]
        order = tokens.argsort(kind="stable")
        ordered, after = tokens[order], places[order] + 1
        starts = numpy.flatnonzero(numpy.diff(ordered, prepend=BREAK - 1))
        ends = numpy.append(starts[1:], len(order))
        by_first = order[starts].argsort()
        groups = zip(*(column[by_first].tolist() for column in (ordered[starts], starts, ends)))
        listed = after.tolist()
        return {
            token: listed[start:end] if end - start <= FEW else ManyPlaces(after[start:end])
            for token, start, end in groups if token != BREAK
        }

    def continuation(self, place: int, most: int, ends: Callable[[int], bool]) -> list[int]:
        """At most `most` tokens from a position on, up to an end token, which is included, or the end of the text."""
        found: list[int] = []
        for token in self._log.tokens[place:min(place + most, self._end)]:
            if token == BREAK:
                break
            found.append(token)
            if ends(token):
                break
        return found

    def digest(self) -> str:
        """Hash of the stored texts."""
        texts = self._log.numbers(self._end)[self._begin:]
        return blake2b(texts.tobytes(), digest_size=8).hexdigest()


def frequent_prefixes(texts: list[list[int]], count: int) -> dict[tuple[int, ...], int]:
    """The `count` most frequent prefixes of texts and how often each occurs, in descending order.

    On ties the shorter comes first, then the one that occurs first. They form a trie: each follows its own prefixes.
    """
    counts = Counter(tuple(text[:end]) for text in texts for end in range(1, len(text) + 1))
    frequent = sorted(counts, key=lambda prefix: (-counts[prefix], len(prefix)))
    return {prefix: counts[prefix] for prefix in frequent[:count]}
