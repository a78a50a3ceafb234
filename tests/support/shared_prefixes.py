"""Sessions whose lanes share a prompt."""
from __future__ import annotations

import torch

from playground.engine.attention.cascade_attention import PartialAttention


def plain_mean(first: PartialAttention, second: PartialAttention) -> torch.Tensor:
    return (first.out + second.out) / 2
