"""Attention logits before scaling and masking."""
from __future__ import annotations

from torch import Tensor

FEW = 4  # query rows up to which the transposed product is faster


def attention_logits(query_states: Tensor, key_states: Tensor) -> Tensor:
    """Products of query states [kv_heads, n, d] with key states [kv_heads, m, d], [kv_heads, n, m]."""
    if query_states.shape[1] <= FEW:
        return (key_states @ query_states.mT).mT
    return query_states @ key_states.mT
