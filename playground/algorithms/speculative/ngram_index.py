"""An index of the start positions of all n-grams of a growing text."""
from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

MANY = 1 << 32  # more than there are token ids


class NGramIndex:
    """The starts of all n-grams of one text, for one n."""

    def __init__(self, n: int):
        self.n = n
        self._text: list[int] = []
        self._starts: dict[int, list[int]] = {}  # by the n-gram as one number

    def follow(self, text: Sequence[int]) -> None:
        """Index the tokens appended since the last call, after removing those that are no longer in the text."""
        self._cut(self._shared(text))
        first = max(0, len(self._text) - self.n + 1)
        self._text.extend(text[len(self._text):])
        for start in range(first, len(text) - self.n + 1):
            self._starts.setdefault(_number(text[start:start + self.n]), []).append(start)

    def _shared(self, text: Sequence[int]) -> int:
        """Tokens of a common prefix with a text; the whole one, if they differ only towards the end."""
        shared, less = min(len(self._text), len(text)), 1
        while text[:shared] != self._text[:shared]:
            shared, less = max(0, shared - less), 2 * less
        return shared

    def _cut(self, length: int) -> None:
        """Remove all but the first `length` tokens."""
        for start in range(len(self._text) - self.n, max(-1, length - self.n), -1):
            self._starts[_number(self._text[start:start + self.n])].pop()
        del self._text[length:]

    def earliest(self, ngram: Sequence[int], end: int) -> int | None:
        """The first start of an n-gram, if it is below `end`."""
        starts = self._starts.get(_number(ngram), [])
        return starts[0] if starts and starts[0] < end else None

    def latest(self, ngram: Sequence[int], end: int) -> int | None:
        """The last start of an n-gram below `end`."""
        starts = self._starts.get(_number(ngram), [])
        before = bisect_left(starts, end)
        return starts[before - 1] if before else None


def _number(ngram: Sequence[int]) -> int:
    number = 0
    for token in ngram:
        number = number * MANY + token
    return number
