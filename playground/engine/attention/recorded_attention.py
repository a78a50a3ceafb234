"""Attention of few rows over all slots of static memory, under a mask that lies on the device.

Torch's fused attention gives each head of a KV cache to one processor of a GPU, which then reads all slots while the
others have nothing to do. Here the slots are divided among processors (`split_keys`); where that kernel cannot run, two
batched matrix products do, which are divided among processors as well.
"""
from __future__ import annotations

import torch
from torch import Tensor

from playground.engine.attention.split_keys import kernel_for

HALF = (torch.float16, torch.bfloat16)


class RecordedAttention:
    """Attention under the mask seen [places, rows, slots]: rows of each place over its slots.

    Every row must see at least one slot, and keys and values that it does not see must be finite.
    """

    def __init__(self, seen: Tensor):
        self._seen = seen
        self._biases: dict[tuple[int, int], Tensor] = {}  # by KV heads and group; the layers of a forward share it

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention [heads, places * rows, d] of queries of this shape; keys and values [kv_heads, places * slots, d].
        """
        if split := kernel_for(query):
            return split(query, keys, values, self._seen, scaling)
        return self._products(query, keys, values, scaling)

    def _products(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        (places, rows, slots), (heads, _, d), kv_heads = self._seen.shape, query.shape, len(keys)
        group = heads // kv_heads
        # the heads of a group become further rows, and places further heads, so no key is copied
        grouped = query.reshape(kv_heads, group, places, rows, d).transpose(1, 2).reshape(-1, group * rows, d)
        keys, values = (held.reshape(-1, slots, d) for held in (keys, values))
        weights = _scores(self._bias(kv_heads, group, query.dtype), grouped, keys, scaling).softmax(-1)
        mixed = (weights.to(values.dtype) @ values).view(kv_heads, places, group, rows, d)
        return mixed.transpose(1, 2).reshape(heads, places * rows, d)

    def _bias(self, kv_heads: int, group: int, dtype: torch.dtype) -> Tensor:
        """0 where a row sees a slot, otherwise -inf, [kv_heads * places, group * rows, slots]."""
        if (kv_heads, group) not in self._biases:
            exact = torch.promote_types(dtype, torch.float32)
            bias = torch.zeros(self._seen.shape, dtype=exact, device=self._seen.device)
            bias = bias.masked_fill_(~self._seen, float("-inf")).repeat(1, group, 1)
            self._biases[kv_heads, group] = bias.expand(kv_heads, *bias.shape).flatten(0, 1).contiguous()
        return self._biases[kv_heads, group]


def _scores(bias: Tensor, query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """bias + scaling * query @ keys^T, in float32 or float64."""
    if query.dtype in HALF and query.is_cuda:
        return torch.baddbmm(bias, query, keys.transpose(1, 2), out_dtype=torch.float32, alpha=scaling)
    return torch.baddbmm(bias, query.to(bias.dtype), keys.to(bias.dtype).transpose(1, 2), alpha=scaling)
