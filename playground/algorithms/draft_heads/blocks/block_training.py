"""Training of a block drafter: blocks of masks after anchors within texts that the target wrote.

Chen et al. 2026, arXiv 2602.06036.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from playground.algorithms.draft_heads.blocks.block_network import DFlashNetwork
from playground.algorithms.draft_heads.head_training import HeadBatch, HeadTexts, embedded, token_loss

ANCHORS = 32  # blocks in each text of a batch
DECAY = 4.0  # the loss at mask k of a block has the weight exp(-(k - 1) / DECAY), for blocks of 8


def seen_by_blocks(anchors: Tensor, block: int, tokens: int) -> Tensor:
    """What the rows of blocks see, [anchors * block, tokens + anchors * block]: the text before the anchor, and the
    own block.
    """
    anchor = anchors.repeat_interleave(block)
    return torch.cat([torch.arange(tokens) < anchor[:, None], anchor[:, None] == anchor], 1)


@dataclass
class BlocksInTexts:
    """The place of the rows of blocks, which come block by block after the same anchors in every text."""

    positions: Tensor  # [rows]
    seen: Tensor  # [rows, tokens + rows]
    keys: Tensor  # of the text, [texts, kv_heads, tokens, d]
    values: Tensor

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
        return scaled_dot_product_attention(query, keys, values, self.seen, enable_gqa=True)


def outputs(network: DFlashNetwork, states: Tensor, rows: Tensor, anchors: Tensor) -> Tensor:
    """Inputs of the lm_head [texts, anchors, block, width] for embeddings of the same shape, and the target's states
    [texts, tokens, reads].
    """
    context, shape, tokens = network.context(states), rows.shape, torch.arange(states.shape[1])
    positions = (anchors[:, None] + torch.arange(shape[2])).flatten()
    seen, rows = seen_by_blocks(anchors, shape[2], len(tokens)), rows.flatten(1, 2)
    for layer in network.layers:
        blocks = BlocksInTexts(positions, seen, *layer.self_attn.states(context, tokens)[1:])
        rows = rows + layer.self_attn(layer.input_layernorm(rows), blocks)
        rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
    return network.norm(rows).view(shape)


def anchors_of(batch: HeadBatch) -> Tensor:
    """Positions [n] whose next token the target wrote in one of the texts: a choice of ANCHORS in a training, otherwise
    all.
    """
    found = batch.written[:, 1:].any(0).nonzero()[:, 0]
    if batch.chance is None:
        return found
    return found[torch.randperm(len(found), generator=batch.chance)[:ANCHORS]]


def guesses(
    network: DFlashNetwork, texts: HeadTexts, batch: HeadBatch, layers: tuple[int, ...], block: int, mask: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each mask of a block the inputs of the lm_head [n, width] and the right tokens [n], where the target wrote
    them.
    """
    anchors = anchors_of(batch)
    states = torch.cat([batch.states[layer] for layer in layers], -1)
    ids = torch.full((len(batch.ids), len(anchors), block), mask)
    ids[..., 0] = batch.ids[:, anchors]
    found = outputs(network, states, embedded(texts, ids), anchors)
    for k in range(1, block):
        inside = anchors + k < batch.ids.shape[1]
        places = anchors[inside] + k
        written = batch.written[:, places]
        yield found[:, inside, k][written], batch.ids[:, places][written]


def losses(found: Iterator[tuple[Tensor, Tensor]], lm_head: Tensor) -> list[Tensor]:
    """The loss of each mask: the first tokens of a block count most, since the others are only tested after them."""
    return [
        math.exp(-k / DECAY) * token_loss(states, lm_head, labels) for k, (states, labels) in enumerate(found)
    ]
