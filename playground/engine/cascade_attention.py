"""Attention over a prefix that several stores hold once, and over what follows it, put together exactly.

Softmax over two sets of keys is the mean of a softmax over each, weighted by what each sums up to before it is
normalised. So the rows of all stores go over the one prefix together, as if they were one longer query, and it is read
once. Juravsky et al. 2024, arXiv 2402.05099.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# torch's own attention on a CPU, which tells its normaliser
FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


class PartialAttention(NamedTuple):
    """What rows read from some of the keys they see."""

    out: Tensor  # [heads, n, d], as if there were no other keys
    total: Tensor  # [heads, n], the natural logarithm of the sum of e to every score, scaled and masked


def attend_part(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float) -> PartialAttention:
    """query [heads, n, d] over keys, values [kv_heads, m, d]; bias as `Segment.bias` makes it. Every row sees at least
    one key.
    """
    kv_heads, (heads, n, _) = keys.shape[0], query.shape
    # the heads of a group are further rows, so no key is copied
    grouped = query.reshape(1, kv_heads, heads // kv_heads * n, -1)
    attend = _fused if FUSED is not None and query.device.type == "cpu" else _written_out
    out, total = attend(grouped, keys[None], values[None], bias, scaling)
    return PartialAttention(out.reshape(heads, n, -1), total.reshape(heads, n))


def _fused(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    return FUSED(query, keys, values, attn_mask=bias, scale=scaling)


def _written_out(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """The same where torch's attention keeps its normaliser to itself."""
    scores = (query @ keys.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scaling
    if bias is not None:
        scores = scores + bias
    total = scores.logsumexp(-1)
    return (scores - total[..., None]).exp().to(values.dtype) @ values, total


def merge(prefix: PartialAttention, suffix: PartialAttention) -> Tensor:
    """What the rows read from all keys of both parts, [heads, n, d]."""
    # of the prefix: e^a / (e^a + e^b), whatever their size
    share = torch.sigmoid(prefix.total - suffix.total)[..., None]
    return torch.lerp(suffix.out.to(share.dtype), prefix.out.to(share.dtype), share).to(suffix.out.dtype)
