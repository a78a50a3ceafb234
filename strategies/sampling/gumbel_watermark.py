"""The Gumbel watermark."""
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch

from playground.contract import Sampler, knob
from playground.engine.sampling import REMOVED
from playground.errors import Refusal
from playground.events import Event, Figure

SIGNIFICANT = 4.0  # standard deviations, as for the other watermarks
REMEMBERED = 4096  # latest positions that are searched for a repeated context
HEX, RANGE, MASK = set("0123456789abcdefABCDEF"), 2**32, 2**32 - 1
Number = int | torch.Tensor  # an unsigned 32-bit number, or int64 tensor of them


class GumbelWatermark(Sampler):
    """Watermark a text by its random numbers: a secret key decides which token is drawn, and each text keeps the
    probability that it would have had.

    A hash of the key and of the last tokens gives a number u between 0 and 1 to each token; the one with the largest
    log(u) / p is chosen. Over random keys that is exactly a draw from p, the Gumbel-max trick, so a single token is not
    distorted, unlike with a green list. Who has the key sees that the chosen u are too large: without a mark,
    -log(1 - u) is exponential with mean 1. The same key and prompt give the same text whatever the seed, except after a
    context that occurred before, where nothing is marked. With a second key, a coin decides at each position which of
    the two marks it. Without a key nothing changes. Tokens are always sampled. Aaronson 2022; hash, two keys and rules
    as in SGLang 0.5.23.
    """

    name, title, paper, sheet, rank = (
        "gumbel_watermark", "Watermark: Gumbel", "Aaronson 2022", "sampling/watermarks", 97
    )
    guarantee = ("collapses",)
    new_in = "2026"

    key: str = knob("5eed0f2026", help="secret key, up to 16 hexadecimal digits; empty changes nothing")
    second_key: str = knob("", help="key of another party, which marks a part of the positions; empty for none")
    width: int = knob(4, 1, 64, step=1, help="number of previous tokens, prompt included, that u depends on")
    mixing: float = knob(0.5, 0.0, 1.0, step=0.05, help="share of the positions that the first of two keys marks")
    max_probability: float = knob(
        1.0, 0.0, 1.0, step=0.05, help="positions with a more probable token are not marked; 1 marks all"
    )

    _evidence = None

    def check(self):
        for name in ("key", "second_key"):
            if len(value := getattr(self, name)) > 16 or not HEX.issuperset(value):
                raise Refusal("A key has at most 16 hexadecimal digits, such as 5eed0f2026: change it.", name)

    @property
    def keys(self) -> "Keys":
        first, second = (int(text, 16) if text else None for text in (self.key, self.second_key))
        return Keys(first, second, self.mixing)

    def apply(self, scores, histories):
        if not self.key:
            return scores
        return torch.stack([self._marked(row, history) for row, history in zip(scores, histories)])

    def _marked(self, row: torch.Tensor, history: list[int]) -> torch.Tensor:
        p, context = row.softmax(-1), tuple(history[-self.width:])
        if float(p.max()) > self.max_probability or context in self._contexts(history):
            return row
        tokens = p.nonzero()[:, 0]
        u = uniform(self.keys.hash(context, tokens))
        chosen = tokens[(u.log() / p[tokens].double()).argmax()]
        return torch.full_like(row, REMOVED).scatter(-1, chosen[None], row[chosen][None])

    def _contexts(self, history: list[int]) -> Iterator[tuple[int, ...]]:
        """The contexts of the tokens that were generated before."""
        places = range(max(self.start, len(history) - REMEMBERED), len(history))
        return (tuple(history[max(0, place - self.width):place]) for place in places)

    def explain(self, scores, history, token) -> Iterator[Event]:
        if not self.key:
            return
        if self._evidence is None:
            self._evidence = Evidence(self.keys, self.width)
        u = self._evidence.read([*history[self.start:], token])
        place = len(history) - self.start
        if u is not None:
            span = [place, place + 1, f"u = {u:.3f}", u]
            yield Figure("spans", "numbers of the chosen tokens", {"spans": [span], "shades": True})
        yield Figure("scalar", "watermark", {"x": place, "series": {"z-score": self._evidence.z},
                                             "lines": {"threshold": SIGNIFICANT}})
        yield Figure("scalar", "chance of such a text without the mark",
                     {"x": place, "series": {"log10 of the p-value": self._evidence.log10_p_value}})


class Keys(NamedTuple):
    """One or two secret keys of 64 bits."""

    first: int | None
    second: int | None
    mixing: float  # share of the positions that belong to the first

    def hash(self, context: Sequence[int], tokens: Number) -> Number:
        """A 32-bit number for each token after a context."""
        after = murmur3(*context)
        return murmur3(*words(self.second if self._belongs_to_the_second(after) else self.first), after, tokens)

    def _belongs_to_the_second(self, after: int) -> bool:
        if self.second is None:
            return False
        return murmur3(*words(self.first), *words(self.second), after) >= int(self.mixing * RANGE)


@dataclass
class Evidence:
    """The detector: reads a growing text without its prompt. The first `width` tokens have no complete context."""

    keys: Keys
    width: int
    count: int = 0  # tokens that count: those after a context that is new
    total: float = 0.0  # of -log(1 - u), each with mean 1 and variance 1 in a text without the mark
    _ids: list[int] = field(default_factory=list)
    _seen: set[tuple[int, ...]] = field(default_factory=set)

    def read(self, ids: list[int]) -> float | None:
        """The number of the last token, None if it does not count. A continuation costs only its new tokens."""
        if ids[:len(self._ids)] != self._ids:
            self.count, self.total, self._ids, self._seen = 0, 0.0, [], set()
        u = None
        for token in ids[len(self._ids):]:
            u = self._next(token)
        return u

    def _next(self, token: int) -> float | None:
        context = tuple(self._ids[-self.width:])
        self._ids.append(token)
        if len(context) < self.width or context in self._seen:
            return None
        self._seen.add(context)
        u = uniform(self.keys.hash(context, token))
        self.count, self.total = self.count + 1, self.total - math.log1p(-u)
        return u

    @property
    def z(self) -> float:
        """Standard deviations by which the text exceeds one without the mark."""
        return (self.total - self.count) / math.sqrt(self.count) if self.count else 0.0

    @property
    def log10_p_value(self) -> float:
        """Decimal logarithm of the chance that a text without the mark has this total: the tail of Gamma(count, 1)."""
        if not self.count:
            return 0.0
        terms = [k * math.log(self.total) - math.lgamma(k + 1) for k in range(self.count)] if self.total else [0.0]
        most = max(terms)
        return (most - self.total + math.log(sum(math.exp(term - most) for term in terms))) / math.log(10)


def uniform(hashed: Number) -> Number:
    """A number in (0, 1) of each 32-bit number, in double precision: near 1 decides."""
    return ((hashed.double() if isinstance(hashed, torch.Tensor) else hashed) + 0.5) / RANGE


def words(key: int) -> tuple[int, int]:
    """A key as two 32-bit words, the lower one first."""
    return key & MASK, key >> 32


def murmur3(*numbers: Number) -> Number:
    """MurmurHash3 of 32-bit words with seed 0 (Appleby 2011). Tensors give the hash of each of their numbers; their
    products overflow 64 bits, which leaves the lower 32 as they are.
    """
    mixed = reduce(_mix, numbers, 0) ^ 4 * len(numbers)
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & MASK
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 & MASK
    return mixed ^ mixed >> 16


def _mix(state: Number, word: Number) -> Number:
    word = _rotated(word * 0xCC9E2D51 & MASK, 15) * 0x1B873593 & MASK
    return _rotated(state ^ word, 13) * 5 + 0xE6546B64 & MASK


def _rotated(value: Number, bits: int) -> Number:
    return (value << bits | value >> 32 - bits) & MASK
