"""Training windows of equal length."""
from __future__ import annotations

import torch
from torch import Tensor


def cut(texts: list[list[int]], length: int) -> Tensor:
    """Non-overlapping windows of `length` tokens of every text, [n, length]; the remainder of a text is dropped."""
    windows = [text[start:start + length] for text in texts for start in range(0, len(text) - length + 1, length)]
    return torch.tensor(windows, dtype=torch.long).view(-1, length)
