"""Texts as windows of equal length, for methods that learn from them."""
from __future__ import annotations

import torch
from torch import Tensor


def cut(texts: list[list[int]], length: int) -> Tensor:
    """Every whole window of `length` tokens, text by text and without overlap, [n, length]; what is left of a text is
    dropped.
    """
    windows = [text[start:start + length] for text in texts for start in range(0, len(text) - length + 1, length)]
    return torch.tensor(windows, dtype=torch.long).view(-1, length)
