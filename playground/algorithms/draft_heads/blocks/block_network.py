"""The network of DFlash: layers in which a block of masks attends to itself and to the target's hidden states.

Each layer turns the same mixture of the target's states into keys and values of its own, which take the place of a text
that it would have read itself. Parameter names are those of vLLM's `speculators`. Chen et al. 2026, arXiv 2602.06036.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, RMSNorm
from torch.nn.functional import scaled_dot_product_attention

from playground.algorithms.draft_heads.feature_networks import EPS, ReadOut, last_layer, set_eps, shape_of
from playground.algorithms.draft_heads.head_layers import (
    THETA,
    GatedFeedForward,
    HeadCache,
    HeadShape,
    SelfAttention,
)

Weights = dict[str, Tensor]
SETTINGS = (  # of a drafter, read by its strategy
    "block_size", "mask_token_id", "layers", "sample_from_anchor", "selector_top_k", "num_jacobi_passes",
)
FACTS = ("head_dim", "rope_theta", "rms_norm_eps", "window", "from_anchor", "causal")  # of a published drafter


class Reach(NamedTuple):
    """What the rows of a block see: all of the text and of the block, unless a layer says otherwise."""

    window: int = 0  # positions to either side of a row; 0 for all
    from_anchor: bool = False  # the window begins so many tokens before the block, and all of the block is in it
    causal: bool = False  # of the block, a row sees those before it and itself

    def seen(self, positions: Tensor, before: Tensor) -> Tensor | None:
        """Which of the text's tokens at `before` [m] and of the block's rows at `positions` [n] each row sees, bool
        [n, m + n]; None for all.
        """
        if not (self.window or self.causal):
            return None
        rows, keys = positions[:, None], torch.cat([before, positions])
        seen = keys <= rows if self.causal else torch.ones_like(rows == keys)
        if self.window and self.from_anchor:
            return seen & (keys >= positions[0] - self.window)
        return seen & ((rows - keys).abs() <= self.window) if self.window else seen


ALL = Reach()


class BlockAttention(SelfAttention):
    """Attention with normed queries and keys, in which the rows of a block see the text and each other."""

    def __init__(self, shape: HeadShape, theta: float = THETA, reach: Reach = ALL):
        super().__init__(shape, theta=theta, normed=True)
        self.reach = reach

    def over(self, rows: Tensor, positions: Tensor, cache: HeadCache, first: int) -> Tensor:
        """The output for a block of rows [n, width] after a text, whose first token in the cache is at `first`."""
        query, keys, values = self.states(rows, positions)
        keys, values = cache.write(keys, values)
        seen = self.reach.seen(positions, torch.arange(first, first + cache.length, device=positions.device))
        found = scaled_dot_product_attention(query[None], keys[None], values[None], seen, enable_gqa=True)
        return self.merged(found[0])


class DFlashLayer(Module):
    """A decoder layer over a block."""

    def __init__(self, shape: HeadShape, theta: float, reach: Reach):
        super().__init__()
        self.self_attn, self.mlp = BlockAttention(shape, theta, reach), GatedFeedForward(shape)
        self.input_layernorm = RMSNorm(shape.width, EPS)
        self.post_attention_layernorm = RMSNorm(shape.width, EPS)

    def forward(self, rows: Tensor, positions: Tensor, cache: HeadCache, first: int) -> Tensor:
        rows = rows + self.self_attn.over(self.input_layernorm(rows), positions, cache, first)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class DFlashNetwork(Module):
    """From embeddings of a block to inputs of an lm_head, which is the target's unless it has its own.

    `reaches` has an entry for each layer.
    """

    layer_class = DFlashLayer

    def __init__(
        self, shape: HeadShape, reads: int, reaches: list[Reach], theta: float = THETA, draft_vocabulary: int = 0
    ):
        super().__init__()
        self.fc, self.hidden_norm = Linear(reads, shape.width, bias=False), RMSNorm(shape.width, EPS)
        self.layers = ModuleList(self.layer_class(shape, theta, reach) for reach in reaches)
        self.norm = RMSNorm(shape.width, EPS)
        self.lm_head = Linear(shape.width, draft_vocabulary, bias=False) if draft_vocabulary else None
        self.register_buffer("d2t", torch.zeros(draft_vocabulary, dtype=torch.long) if draft_vocabulary else None)

    def new_caches(self) -> list[HeadCache]:
        return [HeadCache() for _ in self.layers]

    def see_before_only(self) -> None:
        """Let a row of a block see none of those after it."""
        for layer in self.layers:
            layer.self_attn.reach = layer.self_attn.reach._replace(causal=True)

    def read_out(self, hidden: Tensor, lm_head: ReadOut) -> Tensor:
        """Logits [n, draft vocabulary] of outputs [n, width]; `lm_head` is the target's."""
        return (self.lm_head or lm_head)(hidden)

    def target_ids(self, tokens: Tensor) -> Tensor:
        """The target's ids of tokens of the draft vocabulary."""
        return tokens if self.d2t is None else tokens + self.d2t[tokens]

    def context(self, states: Tensor) -> Tensor:
        """What the layers read of the target's states [..., reads]: [..., width]."""
        return self.hidden_norm(self.fc(states))

    def read(self, states: Tensor, positions: Tensor, caches: list[HeadCache]) -> None:
        """Add the target's states [n, reads] of tokens at positions [n] to the caches."""
        rows = self.context(states)
        for layer, cache in zip(self.layers, caches):
            cache.write(*layer.self_attn.states(rows, positions)[1:])
            cache.commit()

    def forward(self, rows: Tensor, positions: Tensor, caches: list[HeadCache], first: int) -> Tensor:
        """Inputs of the lm_head [n, width] for embeddings of a block [n, width], which leaves the caches as they were.
        """
        for layer, cache in zip(self.layers, caches):
            rows = layer(rows, positions, cache, first)
            cache.crop(cache.length)
        return self.norm(rows)

    @classmethod
    def of(cls, weights: Weights) -> DFlashNetwork:
        """The network with these weights. Raises KeyError or RuntimeError if they are of another network."""
        facts = {name: weights[name] for name in FACTS if name in weights}
        own = {name: tensor for name, tensor in weights.items() if name not in (*FACTS, *SETTINGS)}
        width, reads = own["fc.weight"].shape
        layers = 1 + last_layer(own)
        head_dim = own["layers.0.self_attn.q_norm.weight"].shape[0]
        vocabulary = own["lm_head.weight"].shape[0] if "lm_head.weight" in own else 0
        shape, theta = shape_of(own, "layers.0.", width, head_dim), float(facts.get("rope_theta", THETA))
        network = cls(shape, reads, reaches(facts, layers), theta, vocabulary)
        if vocabulary and "d2t" not in own:
            own["d2t"] = torch.zeros(vocabulary, dtype=torch.long)
        network.load_state_dict(own)
        set_eps(network, float(facts.get("rms_norm_eps", EPS)))
        return network


def part(weights: Weights, name: str) -> Weights:
    """The weights of a part, without its name."""
    return {key.removeprefix(f"{name}."): tensor for key, tensor in weights.items() if key.startswith(f"{name}.")}


def reaches(facts: Weights, layers: int) -> list[Reach]:
    """What the rows of a block see in each layer of a published drafter."""
    windows, causal = (facts.get(name, torch.zeros(layers)).tolist() for name in ("window", "causal"))
    from_anchor = bool(facts.get("from_anchor", False))
    return [Reach(int(window), from_anchor, bool(each)) for window, each in zip(windows, causal)]
