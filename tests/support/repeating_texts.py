"""Texts with repeats, their scores, and counts of tokens in them."""
from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from playground.contract import Sampler

REMOVED = -math.inf
V = 6  # letters a to f


def repeating(count: int = 80, letters: int = 4, longest: int = 20, seed: int = 0) -> list[list[int]]:
    """Random texts of few letters, so that they repeat themselves; none is empty."""
    chance = random.Random(seed)
    return [[chance.randrange(letters) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def scores_for(seed: int) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(cls: type[Sampler], start: int = 0, **knobs) -> Sampler:
    """A sampler that knows where its prompt of `start` tokens ends, and how tokens read."""
    sampler = cls(**knobs)
    sampler.begin(start, lambda token: "abcdef"[token])
    return sampler


def applied(cls: type[Sampler], text: list[int], scores: Tensor, start: int = 0, **knobs) -> list[float]:
    return made(cls, start, **knobs).apply(scores[None], [text])[0].tolist()


# --- frequency and presence ---

def check_counts(cls: type[Sampler], cost: Callable[[int], int]) -> None:
    """s_v - penalty * cost(occurrences of v), counted in the window, and in the prompt on request only."""
    for number, text in enumerate(repeating()):
        start, scores = len(text) // 2, scores_for(number)
        for window, prompt in ((0, False), (0, True), (3, True), (5, False)):
            first = max(0 if prompt else start, len(text) - window if window else 0)
            expected = [float(scores[v]) - 0.7 * cost(text[first:].count(v)) for v in range(V)]
            found = applied(cls, text, scores, start, penalty=0.7, window=window, prompt=prompt)
            assert found == pytest.approx(expected)


class WindowOneShort:
    def apply(self, scores, histories):
        self.window = max(self.window - 1, 0)
        return super().apply(scores, histories)


class CountsThePrompt:
    def apply(self, scores, histories):
        self.prompt = True
        return super().apply(scores, histories)
