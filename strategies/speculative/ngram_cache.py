"""Drafts from n-gram counts, as in llama.cpp's lookup decoding."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from playground.algorithms.fairy_tales import tales
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import chain
from playground.events import Figure

Ngram = tuple[int, ...]
LONGEST = 4  # tokens of the n-grams in the context and dynamic caches
STATIC = 2  # tokens of those in the static cache
MOST = 100_000  # n-grams of earlier runs
# by n-gram length 1 to 4: least occurrences of the n-gram, and least share in percent of its most frequent follower
LAX = ((2, 66), (2, 50), (1, 50), (1, 50))
STRICT = ((4, 75), (3, 66), (2, 66), (2, 66))


class NgramCounts:
    """For each n-gram, how often each token followed it."""

    def __init__(self, lengths: Sequence[int] = range(1, LONGEST + 1)):
        self.lengths = lengths
        self.followers: dict[Ngram, Counter] = {}

    def read(self, tokens: Sequence[int], start: int = 0) -> None:
        """Count the tokens from index `start` on as followers of the n-grams before them."""
        for place in range(start, len(tokens)):
            for n in self.lengths:
                if place >= n:
                    self.followers.setdefault(tuple(tokens[place - n:place]), Counter())[tokens[place]] += 1

    def merge(self, other: NgramCounts) -> None:
        """Add the counts of another cache; beyond MOST n-grams the oldest are dropped."""
        for ngram, counts in other.followers.items():
            self.followers[ngram] = self.followers.pop(ngram, Counter()) + counts
        for ngram in [*self.followers][:max(0, len(self.followers) - MOST)]:
            del self.followers[ngram]

    def after(self, ngram: Ngram) -> Counter:
        return self.followers.get(ngram, Counter())


class Runs:
    """The counts of earlier runs and those of the current one, which are merged into them when the next run begins."""

    def __init__(self):
        self.earlier, self.current = NgramCounts(), NgramCounts()

    def begin(self) -> None:
        self.earlier.merge(self.current)
        self.current = NgramCounts()

    def digest(self) -> str:
        counted = [sorted(map(repr, counts.followers.items())) for counts in (self.earlier, self.current)]
        return blake2b(repr(counted).encode(), digest_size=8).hexdigest()


class NgramCache(Drafter):
    """Count which token follows which n-gram, and draft the clearly most frequent followers. No draft model.

    Three caches are queried in turn. The context cache counts the text so far and the dynamic cache earlier runs, both
    for n-grams of four tokens down to one; thresholds for the number of occurrences and for the share of the most
    frequent follower are lax for the former and strict for the latter. The static cache counts followers of token pairs
    in a bundled or given text, and also weights the followers in the other two. Useful where wording recurs within a
    text or between runs; it needs no accelerator memory. length = 0 is plain decoding. Gäßler 2024, llama.cpp pull
    request 5479.
    """

    name, title, paper, sheet = "ngram_cache", "N-gram caches (llama.cpp)", "Gäßler 2024", "speculative/prompt-lookup"
    guarantee, remembers = ("collapses",), True

    length: int = knob(5, 0, 32, step=1, help="draft tokens per round; 0 is plain decoding")
    static: bool = knob(True, help="use the static cache, built from the text below")
    dynamic: bool = knob(True, help="use the dynamic cache, built from earlier runs")
    corpus: str = knob("", multiline=True, file=True, help="text of the static cache; empty for the bundled tales")

    _runs = _static = None
    _read = 0

    def propose(self, lm: Lane, budget) -> Iterator:
        if not self.length:
            return chain([], self.name)
        if self._runs is None:
            self._begin(lm)
        self._runs.current.read(lm.tokens, self._read)
        self._read = len(lm.tokens)
        drafted, sources = self.look_up(lm.tokens, min(self.length, budget), lm.ends)
        if drafted:
            series = {name: sources.count(name) for name in ("context", "dynamic", "static")}
            yield Figure("scalar", "draft tokens by cache", {"x": lm.generated, "series": series})
        return chain(drafted, self.name)

    def _begin(self, lm: Lane) -> None:
        self._runs, self._static = lm.memory(self.name, Runs) if self.dynamic else Runs(), NgramCounts([STATIC])
        self._runs.begin()
        if self.static:
            self._static.read(lm.spell(self.corpus.strip() or tales()))

    def look_up(self, text, count, ends=lambda token: False) -> tuple[list[int], list[str]]:
        """Up to `count` draft tokens after a text, and the cache that each came from."""
        drafted: list[int] = []
        sources: list[str] = []
        while len(drafted) < count and not (drafted and ends(drafted[-1])):
            token, source = self._next([*text[-LONGEST:], *drafted][-LONGEST:])
            if token is None:
                break
            drafted.append(token)
            sources.append(source)
        return drafted, sources

    def _next(self, recent: list[int]) -> tuple[int | None, str]:
        static = self._static.after(tuple(recent[-STATIC:]))
        for source, cache, limits in (
            ("context", self._runs.current, LAX), ("dynamic", self._runs.earlier, STRICT)
        ):
            for n in range(min(LONGEST, len(recent)), 0, -1):
                token = favourite(cache.after(tuple(recent[-n:])), *limits[n - 1], static)
                if token is not None:
                    return token, source
        return favourite(static, *LAX[STATIC - 1]), "static"


def favourite(counts: Counter, occurrences: int, percent: int, static: Counter | None = None) -> int | None:
    """The most frequent follower, if there are at least `occurrences` and it has at least `percent` of them.

    The count of a follower that the static cache contains is multiplied by 100 times its count there. Ties go to the
    first.
    """
    total = sum(counts.values())
    if total < max(1, occurrences):
        return None
    weigh = (lambda token: counts[token] * (100 * static[token] if token in static else 1)) if static else counts.get
    best = max(counts, key=weigh)
    return best if 100 * counts[best] >= percent * total else None
