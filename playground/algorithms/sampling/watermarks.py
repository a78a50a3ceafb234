"""Watermarks in sampled text: generation and detection, as plain functions.

Two kinds: green lists (Kirchenbauer et al. 2023) and tournaments (SynthID, Dathathri et al. 2024). The hashes are those
of the transformers library, so that its detectors read texts generated here, and vice versa.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

Ngram = tuple[int, ...]

MOST_SEED = 2**64 - 1
MULTIPLIER, INCREMENT = 6364136223846793005, 1  # of the linear congruential generator that hashes n-grams
TABLE, TABLE_SEED = 2**16, 0  # size and seed of the table of coin flips that hashes point into
REMEMBERED = 1024  # latest contexts that are searched for a repetition


class Detection(NamedTuple):
    """The result of a detector: the value of each token in [0, 1], None if it is not counted, and the z-score.
    """

    values: list[float | None]
    z: float


def z_score(hits: float, count: int, chance: float) -> float:
    """Standard deviations by which `hits` of `count` exceed their expectation; 0 if nothing is counted."""
    return (hits - chance * count) / math.sqrt(count * chance * (1 - chance)) if count else 0.0


@dataclass
class Detector:
    """Scores a growing text, each of its tokens once."""

    width: int  # preceding tokens that determine its value
    chance: float  # mean value of a token without a watermark
    flips: int  # number of independent flips whose mean is the value of a token
    value: Callable[[Ngram, int], float]  # of a token after its context
    memory: float  # tokens for which an n-gram counts as seen; 0 counts every copy
    by_context: bool  # whether a context is seen once, whatever follows it
    _ids: list[int] = field(default_factory=list)
    _values: list[float | None] = field(default_factory=list)
    _last: dict[Ngram, int] = field(default_factory=dict)  # where each n-gram was seen last

    def read(self, ids: Sequence[int]) -> Detection:
        """The detection in a whole text. Reading a continuation of the last text costs only its new tokens."""
        if list(ids[:len(self._ids)]) != self._ids:
            self._ids, self._values, self._last = [], [], {}
        for token in ids[len(self._ids):]:
            self._values.append(self._next(token))
            self._ids.append(token)
        hits = [value for value in self._values if value is not None]
        return Detection(list(self._values), z_score(sum(hits) * self.flips, len(hits) * self.flips, self.chance))

    def _next(self, token: int) -> float | None:
        place = len(self._ids)
        if place < self.width:
            return None
        context = tuple(self._ids[place - self.width:])
        seen = context if self.by_context else (*context, token)
        before, self._last[seen] = self._last.get(seen), place
        repeated = before is not None and place - before <= self.memory
        return None if repeated else self.value(context, token)


# --- green lists ---


@lru_cache(maxsize=64)
def green_mask(previous: int, size: int, gamma: float, key: int) -> Tensor:
    """The green tokens after `previous`, a share gamma of the vocabulary, bool [size]."""
    generator = torch.Generator().manual_seed(key * previous % MOST_SEED)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.randperm(size, generator=generator)[:int(size * gamma)]] = True
    return mask


def green_detector(size: int, gamma: float, key: int, repeats: bool = False) -> Detector:
    """Counts the tokens that are green after the token before them, over a vocabulary of `size`.

    A repeated pair of tokens is counted once, because its copies add no evidence; with `repeats` every time.
    """
    return Detector(1, gamma, 1, partial(_greenness, size, gamma, key), 0 if repeats else math.inf, by_context=False)


def _greenness(size: int, gamma: float, key: int, context: Ngram, token: int) -> float:
    return float(green_mask(context[-1], size, gamma, key)[token])


# --- tournaments ---


@lru_cache(maxsize=1)
def coin_flips() -> Tensor:
    """The table of zeros and ones that hashes point into, [TABLE]."""
    return torch.randint(0, 2, (TABLE,), generator=torch.Generator().manual_seed(TABLE_SEED))


def _hashed(start: Tensor, tokens: Sequence[int] | Tensor) -> Tensor:
    """Hashes after further tokens, one after the other, int64 modulo 2 ** 64; a tensor of tokens broadcasts."""
    for token in [tokens] if isinstance(tokens, Tensor) else tokens:
        start = (start + token) * MULTIPLIER + INCREMENT
    return start


def g_values(context: Sequence[int], tokens: Tensor, keys: Sequence[int]) -> Tensor:
    """A coin flip, 0 or 1, for each layer of the tournament and each of the tokens after a context, [layers, tokens].
    """
    ngrams = _hashed(_hashed(torch.ones((), dtype=torch.long), context), tokens)
    return torch.stack([coin_flips()[_hashed(ngrams, [key]) % TABLE] for key in keys])


def tournament(p: Tensor, g: Tensor) -> Tensor:
    """The distribution of the winner of a tournament between 2 ** layers tokens drawn from p [V].

    In each layer the tokens compete in pairs: the one with the larger coin flip of `g` [layers, V] wins, and of equal
    ones either.
    """
    for layer in g.to(p):
        p = p * (1 + layer - (layer * p).sum())
    return p


def context_of(ids: Sequence[int], width: int) -> Ngram:
    """The last `width` tokens; missing ones before the start are 0."""
    return (*[0] * (width - len(ids)), *ids[max(0, len(ids) - width):])


def is_repeated(ids: Sequence[int], width: int) -> bool:
    """Whether the context of the next token was already that of an earlier one."""
    contexts = (context_of(ids[:end], width) for end in range(max(0, len(ids) - REMEMBERED), len(ids)))
    return context_of(ids, width) in contexts


def tournament_detector(width: int, keys: Sequence[int]) -> Detector:
    """Scores each token that has `width` tokens before it, in a new context, by its mean coin flip."""
    return Detector(width, 0.5, len(keys), partial(_mean_flip, tuple(keys)), REMEMBERED, by_context=True)


def _mean_flip(keys: Ngram, context: Ngram, token: int) -> float:
    return float(g_values(context, torch.tensor([token]), keys).double().mean())
