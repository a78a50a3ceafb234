"""A published layer for multi-token prediction, which is used again for every further token.

It has the members of `engine.mtp_layers.MtpLayers`, so that one drafter serves both. Parameter names are those of
vLLM's `speculators`. Cai et al. 2025, arXiv 2509.18362.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Linear, Module, RMSNorm

from playground.algorithms.draft_heads.blocks.block_network import BlockAttention
from playground.algorithms.draft_heads.feature_networks import EPS, set_eps, shape_of
from playground.algorithms.draft_heads.head_layers import (
    THETA,
    GatedFeedForward,
    HeadCache,
    HeadShape,
    NewRows,
    Place,
)

Weights = dict[str, Tensor]
FACTS = ("head_dim", "rope_theta", "rms_norm_eps", "steps")


class MtpBlock(Module):
    """One decoder layer over the normed embedding of a token beside the normed state of the token before it."""

    def __init__(self, shape: HeadShape, theta: float = THETA):
        super().__init__()
        self.hidden_layernorm, self.token_layernorm = RMSNorm(shape.width, EPS), RMSNorm(shape.width, EPS)
        self.input_proj = Linear(2 * shape.width, shape.width, bias=False)
        self.self_attn, self.mlp = BlockAttention(shape, theta), GatedFeedForward(shape)
        self.input_layernorm = RMSNorm(shape.width, EPS)
        self.post_attention_layernorm = RMSNorm(shape.width, EPS)
        self.final_layernorm = RMSNorm(shape.width, EPS)

    def forward(self, embeddings: Tensor, states: Tensor, place: Place) -> Tensor:
        rows = self.input_proj(torch.cat([self.token_layernorm(embeddings), self.hidden_layernorm(states)], -1))
        rows = rows + self.self_attn(self.input_layernorm(rows), place)
        return self.final_layernorm(rows + self.mlp(self.post_attention_layernorm(rows)))

    @classmethod
    def of(cls, weights: Weights) -> MtpBlock:
        """The layer with these weights. Raises KeyError or RuntimeError if they are of another network."""
        facts = {name: float(weights[name]) for name in FACTS if name in weights}
        own = {name: tensor for name, tensor in weights.items() if name not in FACTS}
        width, head_dim = own["input_proj.weight"].shape[0], own["self_attn.q_norm.weight"].shape[0]
        block = cls(shape_of(own, "", width, head_dim), facts.get("rope_theta", THETA))
        block.load_state_dict(own)
        set_eps(block, facts.get("rms_norm_eps", EPS))
        return block


class StepCaches:
    """The cache of each step, which all hold the same number of rows."""

    def __init__(self, steps: int):
        self.steps = [HeadCache() for _ in range(steps)]

    def crop(self, count: int) -> None:
        """Drop the last `-count` rows."""
        for cache in self.steps:
            cache.crop(cache.length + count)


class MtpHead:
    """The layer with the target's embeddings and lm_head."""

    def __init__(
        self, block: MtpBlock, steps: int, embed: Callable[[list[int]], Tensor], read_out: Callable[[Tensor], Tensor]
    ):
        self.block, self.count, self.embed, self.logits = block, steps, embed, read_out

    def new_cache(self) -> StepCaches:
        return StepCaches(self.count)

    def states(self, number: int, states: Tensor, tokens: list[int], first: int, cache: StepCaches) -> Tensor:
        """The output [n, hidden_size] of a step for states [n, hidden_size] and tokens at positions from `first` on."""
        positions = torch.arange(first, first + len(tokens), device=states.device)
        found = self.block(self.embed(tokens), states, NewRows(cache.steps[number], positions))
        cache.steps[number].commit()
        return found
