"""What heads of a layer retain together: budgets they compete for, and chunks that are retained as a whole.

Budgets: Feng et al. 2024, arXiv 2407.11550; chunks: Liu et al. 2025, arXiv 2502.00299.
"""
from __future__ import annotations

import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import top_slots


def shared_out(scores: Tensor, eligible: Tensor, even: int, alpha: float) -> Tensor:
    """Which of the `eligible` are chosen, bool, all [heads, n]: `even` per head on average.

    Each head takes a share alpha of an even budget by its own scores; the rest goes to the best of all heads.
    """
    own = top_slots(scores, int(alpha * even), eligible)
    rest = even * len(scores) - int(own.sum())
    best = top_slots(scores.flatten()[None], rest, (eligible & ~own).flatten()[None])
    return own | best.view_as(own)


def chunk_means(scores: Tensor, number: Tensor, eligible: Tensor) -> tuple[Tensor, Tensor]:
    """Mean score of the eligible slots of each chunk, [heads, chunks], and which chunks have any.

    `scores` and `eligible` are [heads, slots]; `number` [heads, slots] is the chunk of each slot.
    """
    sums, counts = (
        scores.new_zeros(len(scores), int(number.max()) + 1).scatter_add(1, number, each * eligible)
        for each in (scores, torch.ones_like(scores))
    )
    return sums / counts.clamp(min=1), counts > 0
