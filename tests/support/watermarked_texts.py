"""Keys, texts and rows for watermarks."""
from __future__ import annotations

import torch
from torch import Tensor

V, KEY, KEYS, WIDTH = 40, 15485863, [654, 400, 836], 2


def texts(count: int, length: int, size: int = V, seed: int = 0) -> list[list[int]]:
    """Uniformly random texts, without any watermark."""
    return torch.randint(size, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
