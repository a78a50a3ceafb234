"""Rows and histories, read by the library's processors."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from playground.contract import Sampler

REMOVED = -math.inf
V, END = 6, 5


def histories() -> list[list[int]]:
    """Random texts, and those that end in all but the last token of a phrase."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(V, (n,), generator=generator).tolist() for n in (1, 2, 3, 5, 8, 8)]
    return [*drawn, [2, 0], [3, 3], [4, 3, 3], [0]]


def rows() -> Tensor:
    scores = torch.randn(len(histories()), V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores[::3, 4] = REMOVED
    return scores


def begun(sampler: Sampler, start: int = 1) -> Sampler:
    sampler.begin(start, str, frozenset([END]))
    return sampler


def by_the_library(processor: Callable[[list[int]], Callable]) -> Tensor:
    """Each row after the library's processor; processor(history) makes it."""
    return torch.cat([processor(history)(torch.tensor([history]), row[None])
                      for row, history in zip(rows(), histories())])


# --- logit bias and forbidden words ---

def with_phrases(sampler: Sampler, phrases: dict) -> Sampler:
    sampler._phrases = phrases
    return begun(sampler)


def everywhere(scores: Tensor, phrases: dict) -> Tensor:
    """Wrong: the last token of a phrase counts wherever the text ends."""
    changed = scores.clone()
    for phrase, value in phrases.items():
        changed[:, phrase[-1]] += value
    return changed
