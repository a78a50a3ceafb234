"""Rows of KV caches to pack."""
from __future__ import annotations

import torch
from pairs import pair

PROMPT = [54, 71, 71, 54, 9, 71, 71, 200, 13, 54, 80, 71, 100, 9, 9, 31, 54, 71, 120, 7, 88, 41, 3, 77]
LENGTH = 14


def rows(
    heads: int = 2, count: int = 24, d: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    return torch.randn(heads, count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def models(architecture: str = "llama") -> dict:
    both = pair(architecture)
    return {"target": both.target, "draft": both.draft}
