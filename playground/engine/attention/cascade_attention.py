"""Attention over a prefix that several KV caches share, merged exactly with attention over what follows it.

Softmax attention over two sets of keys is the mean of the attention over each, weighted by their softmax denominators.
So the rows of all caches attend to the shared prefix in one batch, which reads it once. Juravsky et al. 2024, arXiv
2402.05099.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# torch's fused CPU attention, which also returns the log-sum-exp of the scores
FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


class PartialAttention(NamedTuple):
    """Attention of rows over some of the keys they see."""

    out: Tensor  # [heads, n, d], as if there were no other keys
    total: Tensor  # [heads, n], log-sum-exp of the scaled and masked scores

    def to(self, device: torch.device | str) -> PartialAttention:
        """The same on another device."""
        return PartialAttention(self.out.to(device), self.total.to(device))


def attend_part(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float) -> PartialAttention:
    """Attention of query [heads, n, d] over keys and values [kv_heads, m, d], with a bias as `Segment.bias` makes it.

    Every row must see at least one key.
    """
    kv_heads, (heads, n, _) = keys.shape[0], query.shape
    # the heads of a group become further rows, so no key is copied
    grouped = query.reshape(1, kv_heads, heads // kv_heads * n, -1)
    fits = query.device.type == "cpu" and keys.shape[2] == values.shape[2]
    attend = _fused if FUSED is not None and fits else _unfused
    out, total = attend(grouped, keys[None], values[None], bias, scaling)
    return PartialAttention(out.reshape(heads, n, -1), total.reshape(heads, n))


def _fused(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    return FUSED(query, keys, values, attn_mask=bias, scale=scaling)


def _unfused(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """The same for devices whose fused attention does not return the log-sum-exp."""
    scores = (query @ keys.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    if bias is not None:
        scores = scores + bias
    total = scores.logsumexp(-1)
    return (scores - total[..., None]).exp().to(values.dtype) @ values, total


def merge(prefix: PartialAttention, suffix: PartialAttention) -> Tensor:
    """Attention over the keys of both parts, [heads, n, d]."""
    # weight of the prefix: e^a / (e^a + e^b), without overflow
    share = torch.sigmoid(prefix.total - suffix.total)[..., None]
    return torch.lerp(suffix.out.to(share.dtype), prefix.out.to(share.dtype), share).to(suffix.out.dtype)
