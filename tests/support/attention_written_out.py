"""Attention written out over the whole text."""
from __future__ import annotations

from collections.abc import Callable

import torch
from pairs import network
from transformers import AttentionInterface

from support.eviction import LENGTH, PROMPT

Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""change(queries [heads, n, d], keys [heads, n, d], causal scores [heads, n, n], scaling) -> scores"""


@torch.inference_mode()
def written_out(architecture: str, change: Change, length: int = LENGTH) -> list[int]:
    """Greedy decoding that reads the whole text again for each token, with the scores of attention changed."""
    def attention(module, query, key, value, mask, scaling, **others):
        q, (k, v) = query[0], (part[0].repeat_interleave(query.shape[1] // part.shape[1], 0) for part in (key, value))
        scores = (q @ k.transpose(1, 2) * scaling).masked_fill(
            ~torch.ones(q.shape[1], q.shape[1]).tril().bool(), float("-inf")
        )
        return (change(q, k, scores, scaling).softmax(-1) @ v).transpose(0, 1)[None], None

    AttentionInterface.register("written_out", attention)
    by_hand, ids = network(architecture), list(PROMPT)
    by_hand.set_attn_implementation("written_out")
    for _ in range(length):
        ids.append(int(by_hand(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT):]
