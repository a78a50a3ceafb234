"""Drafts from n-grams whose continuations are counted, as in llama.cpp."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from playground.algorithms.speculative.ngram_index import NGramIndex
from playground.contract import Drafter, Lane, knob
from playground.contract.token_tree import chain
from playground.events import Figure

CONTINUATIONS = 4  # different ones that are counted for each n-gram
CLEAR = 3  # how much more often the most frequent one occurred than all others together


@dataclass
class CountedContinuation:
    """The tokens after a key at one or more places of the text."""

    place: int  # where they first occurred
    count: int = 0
    accepted: int | None = None  # draft tokens that were accepted the last time; None if it was never drafted


@dataclass
class Key:
    """An n-gram that was looked up and found."""

    lookups: int = 0
    counted: int = 0  # occurrences that begin below this place are counted, and the one that begins there
    continuations: list[CountedContinuation] = field(default_factory=list)


class NgramMap(Drafter):
    """If the last n tokens occurred before, draft what followed their latest occurrence, as far as the text accepted it
    the last time. No draft model.

    Of each n-gram that was found, the rule k4v counts up to four different continuations, and drafts only once the
    n-gram was looked up `least` times and its most frequent continuation occurred three times as often as all others
    together. The rule k counts nothing: it is prompt lookup with one n. Both remember for each n-gram how many of its
    draft tokens were accepted, and draft no more the next time, in k for good; an n-gram none of whose tokens was
    accepted is given up. That is what the engine does, also that the draft is copied from the latest occurrence where
    another continuation was counted, and that the latest one is counted again by the next lookup. depth = 0 is plain
    decoding. llama.cpp 2026 (ngram-map-k, ngram-map-k4v).
    """

    name, title, paper, sheet = "ngram_map", "N-gram map (llama.cpp)", "llama.cpp 2026", "speculative/prompt-lookup"
    guarantee, new_in = ("collapses",), "2026"

    n: int = knob(6, 1, 32, step=1, help="tokens of an n-gram; llama.cpp has 12, for long texts")
    depth: int = knob(12, 0, 48, step=1, help="tokens of a continuation, and of a draft; llama.cpp has 48")
    rule: str = knob("k4v", choices=("k", "k4v"), help="k4v counts continuations, k takes the latest one")
    least: int = knob(1, 1, 16, step=1, help="k4v: lookups of an n-gram from which it drafts")

    def __post_init__(self):
        self._index = NGramIndex(self.n)
        self._keys: dict[tuple[int, ...], Key] = {}
        self._drafted: CountedContinuation | None = None

    def propose(self, lm: Lane, budget) -> Iterator:
        if not self.depth:
            return chain([], self.name)
        drafted = self.look_up(lm.tokens, min(self.depth, budget), lm.ends)
        series = {"n-grams": len(self._keys), "draft tokens": len(drafted)}
        yield Figure("scalar", "map of n-grams", {"x": lm.generated, "series": series})
        return chain(drafted, self.name)

    def observe(self, tree, rows, verdict) -> None:
        """Remember how much of the draft was accepted."""
        if self._drafted and len(tree):
            self._drafted.accepted = len(verdict.kept)

    def look_up(self, text: Sequence[int], count: int, ends=lambda token: False) -> list[int]:
        """Up to `count` draft tokens after a text."""
        self._index.follow(text)
        self._drafted = None
        place = self._latest(text)
        if place is None:
            return []
        key = self._keys.setdefault(tuple(text[-self.n:]), Key())
        key.lookups += 1
        self._drafted = self._chosen(key, text, place)
        if self._drafted is None:
            return []
        most = count if self._drafted.accepted is None else min(count, self._drafted.accepted)
        found = list(text[place + self.n:place + self.n + most])
        end = next((i + 1 for i, token in enumerate(found) if ends(token)), most)
        return found[:end]

    def _latest(self, text: Sequence[int]) -> int | None:
        """The latest place of the last n-gram with a whole continuation before the last token; never the first place.
        """
        if len(text) <= 2 * self.n + self.depth:
            return None
        return self._index.latest(text[-self.n:], len(text) - self.n - self.depth - 1) or None

    def _chosen(self, key: Key, text: Sequence[int], place: int) -> CountedContinuation | None:
        """The continuation to draft from, if there is one."""
        if self.rule == "k":
            key.continuations = key.continuations or [CountedContinuation(place + self.n)]
            return key.continuations[0]
        if key.lookups < self.least:
            return None
        self._count(key, text, place)
        best = max(key.continuations, key=lambda each: each.count)
        others = sum(each.count for each in key.continuations) - best.count
        return best if best.count >= CLEAR * others else None

    def _count(self, key: Key, text: Sequence[int], last: int) -> None:
        """Count what followed the key at the places up to the last one."""
        for place in range(key.counted, last + 1):
            if tuple(text[place:place + self.n]) == tuple(text[-self.n:]):
                self._add(key, text, place + self.n)
        key.counted = last

    def _add(self, key: Key, text: Sequence[int], place: int) -> None:
        """Count the continuation at a place; a fifth one counts nowhere."""
        tokens = text[place:place + self.depth]
        for known in key.continuations:
            if text[known.place:known.place + self.depth] == tokens:
                known.count += 1
                return
        if len(key.continuations) < CONTINUATIONS:
            key.continuations.append(CountedContinuation(place, 1))
