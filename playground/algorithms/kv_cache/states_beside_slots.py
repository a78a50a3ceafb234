"""Key and value states that belong to no token of the text, and that rows attend to beside the cache."""
from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class SeenSlots(Protocol):
    """Attention over the slots of the cache alone (`engine.cascade_attention.PartialAttention`)."""

    out: Tensor  # [heads, n, d]
    total: Tensor  # [heads, n], log-sum-exp of the scaled scores


def attend_also(query: Tensor, keys: Tensor, values: Tensor, seen: SeenSlots) -> tuple[Tensor, Tensor]:
    """Attention [heads, n, d] over the slots and over further keys and values [kv_heads, m, d], which all rows see.

    The second result is the share of the further ones, [heads, n].
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = len(query) // len(keys)
    keys, values = (states.repeat_interleave(groups, 0).to(wide) for states in (keys, values))
    scores = query.to(wide) @ keys.transpose(1, 2) * query.shape[2] ** -0.5
    total = scores.logsumexp(-1)
    share = torch.sigmoid(total - seen.total.to(wide))
    out = (scores - total[..., None]).exp() @ values
    return torch.lerp(seen.out.to(wide), out, share[..., None]), share
