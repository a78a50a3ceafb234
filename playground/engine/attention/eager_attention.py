"""Attention computed step by step, for what torch's fused attention does not do: it returns the weights, squashes the
scores and adds sinks.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from playground.engine.attention.attention_logits import attention_logits


class Scoring(NamedTuple):
    """What a model does to attention scores beyond scaling them."""

    softcap: float | None = None  # scores are squashed into (-softcap, softcap)
    sinks: Tensor | None = None  # [heads], a further score in each head's softmax that belongs to no key


def eager_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | str | None, scaling: float,
                     scoring: Scoring | None) -> tuple[Tensor, Tensor]:
    """Attention and its weights, [kv_heads, group, n, m], with a mask as `Segment.mask` makes it.

    Used if all rows are watched, and for scores that torch's fused attention does not support.
    """
    kv_heads, (heads, n, _) = keys.shape[0], query.shape
    mask = grouped(mask, heads // kv_heads, n, query.device)
    weights = _softmax(query.reshape(kv_heads, heads // kv_heads * n, -1), keys, mask, scaling, scoring)
    output = (weights.to(values.dtype) @ values).reshape(heads, n, -1)
    return output, weights.reshape(kv_heads, heads // kv_heads, n, -1)


def grouped(mask: Tensor | str | None, groups: int, n: int, device: torch.device) -> Tensor | None:
    """A mask repeated for the query heads of a group."""
    if mask is None:
        return None
    if isinstance(mask, str):
        mask = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    return _repeated(mask, groups)


def _repeated(mask: Tensor, groups: int) -> Tensor:
    """A mask [..., rows, slots] repeated for groups * rows rows; a single row is broadcast instead."""
    return mask if groups == 1 or mask.shape[-2] == 1 else mask.repeat(*[1] * (mask.dim() - 2), groups, 1)


def attention_weights(
    query: Tensor, keys: Tensor, mask: Tensor | str | None, rows: list[int], scaling: float, scoring: Scoring | None
) -> Tensor:
    """Attention weights of some rows, summed over the query heads of a group, [kv_heads, len(rows), m].

    Computed separately, so that the output can still come from fused attention, which does not return weights.
    """
    kv_heads, (heads, n, _) = keys.shape[0], query.shape
    mask = grouped(mask, 1, n, query.device)
    if len(rows) < n:
        query, mask = query[:, rows], None if mask is None else mask[..., rows, :]
    mask = None if mask is None else _repeated(mask, heads // kv_heads)
    weights = _softmax(query.reshape(kv_heads, heads // kv_heads * len(rows), -1), keys, mask, scaling, scoring)
    return weights.reshape(kv_heads, heads // kv_heads, len(rows), -1).sum(1)


def _softmax(query: Tensor, keys: Tensor, mask: Tensor | None, scaling: float, scoring: Scoring | None) -> Tensor:
    return softmax_of(attention_logits(query, keys) * scaling, mask, scoring)


def softmax_of(scores: Tensor, mask: Tensor | None, scoring: Scoring | None) -> Tensor:
    """Attention weights of scaled scores [kv_heads, rows, m], the rows of a query head together, under a mask."""
    if scoring is not None and scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    if scoring is None or scoring.sinks is None:
        return scores.softmax(-1, dtype=wide)
    sinks = scoring.sinks.view(len(scores), -1)
    sinks = sinks.repeat_interleave(scores.shape[1] // sinks.shape[1], 1)
    return torch.cat([scores, sinks[..., None].to(scores.dtype)], -1).softmax(-1, dtype=wide)[..., :-1]
