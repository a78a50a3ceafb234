"""The forward of a model of the Llama family with gradients, for training what a compute policy decides with.

The fused forward runs in inference mode. This one reads whole texts without a KV cache, over copies of the same
weights, which stay as they are: what is trained is what a `LayerSteps` puts in place of a layer or of its feed-forward
network.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from playground.engine.fused_llama import FusedLayer, FusedLinear, FusedLlama, RMSNorm
from playground.engine.layer_choices import LayerSteps


class Norm(NamedTuple):
    """An RMS norm: its weight [d] and its epsilon."""

    weight: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class Projection(NamedTuple):
    """A linear layer that is not trained."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class DifferentiableLayer:
    """One decoder layer over hidden states [texts, n, d]."""

    def __init__(self, layer: FusedLayer):
        self.index, self.scaling, self.head_dim = layer.index, layer.scaling, layer.head_dim
        self.heads, self.kv_heads = layer.heads, layer.kv_heads
        self.input_norm, self.mlp_norm = _norm(layer.input_norm), _norm(layer.mlp_norm)
        self.head_norms = [_norm(norm) for norm in layer.head_norms]
        self.qkv, self.out = _projection(layer.qkv), _projection(layer.out)
        self.gate_up, self.down = _projection(layer.ffn.gate_up), _projection(layer.ffn.down)

    def run(self, hidden: Tensor, angles: tuple[Tensor, Tensor], steps: LayerSteps, visible: Tensor | None) -> Tensor:
        """The layer's output [texts, n, d]; tokens that are not `visible`, bool [texts, n], are seen by none but
        themselves.
        """
        hidden = hidden + self.out(self._attention(self.input_norm(hidden), angles, steps, visible))
        return hidden + steps.feed_forward(self.index, self.mlp_norm(hidden), self.feed_forward)

    def feed_forward(self, normed: Tensor) -> Tensor:
        gate, up = self.gate_up(normed).chunk(2, -1)
        return self.down(silu(gate) * up)

    def _attention(
        self, normed: Tensor, angles: tuple[Tensor, Tensor], steps: LayerSteps, visible: Tensor | None
    ) -> Tensor:
        qkv = self.qkv(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [texts, heads + 2 kv_heads, n, d]
        query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.head_norms:
            query, key = (norm(states) for norm, states in zip(self.head_norms, (query, key)))
        query, key = (_rotated(states, *angles) for states in (query, key))
        key, value = (states.repeat_interleave(self.heads // self.kv_heads, 1) for states in (key, value))
        mask = None if visible is None else _mask(visible)
        if steps.reads_attention:
            steps.attended(self.index, *_weights(query, key, mask, self.scaling))
        causal = mask is None
        mixed = scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=self.scaling)
        return mixed.transpose(1, 2).flatten(2)


class DifferentiableLlama:
    """A network whose layers may be replaced in part: token ids in, logits out, with gradients."""

    def __init__(self, network: FusedLlama):
        self.embeddings = _copy(network.embeddings)
        self.head, self.norm = _projection(network.head), _norm(network.norm)
        self.layers = [DifferentiableLayer(layer) for layer in network.layers]
        self.angles = _copy(network.cos), _copy(network.sin)

    def __call__(self, ids: Tensor, steps: LayerSteps) -> Tensor:
        """Logits [texts, n, V] of texts [texts, n] that are padded at the end."""
        hidden, angles = embedding(ids, self.embeddings), tuple(table[:ids.shape[1]] for table in self.angles)
        for layer in self.layers:
            def run(states: Tensor, visible: Tensor | None = None, layer: DifferentiableLayer = layer) -> Tensor:
                return layer.run(states, angles, steps, visible)

            hidden = steps.layer(layer.index, hidden, run)
        return self.head(self.norm(hidden))


def _copy(weight: Tensor) -> Tensor:
    """A copy in float32 that may take part in a computation with gradients; tensors of the fused forward may not."""
    return weight.detach().clone().float()


def _norm(norm: RMSNorm) -> Norm:
    return Norm(_copy(norm.weight), norm.epsilon)


def _projection(layer: FusedLinear) -> Projection:
    return Projection(_copy(layer.weight), None if layer.bias is None else _copy(layer.bias))


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return states * cos + states.roll(states.shape[-1] // 2, -1) * sin


def _mask(visible: Tensor) -> Tensor:
    """Which keys each query sees: earlier visible ones and itself, bool [texts, 1, n, n]."""
    size = visible.shape[1]
    causal = torch.ones(size, size, dtype=torch.bool, device=visible.device).tril()
    itself = torch.eye(size, dtype=torch.bool, device=visible.device)
    return ((causal & visible[:, None]) | itself)[:, None]


@torch.no_grad()
def _weights(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention weights of every query, averaged over heads [texts, n, n], and which entries count."""
    if mask is None:
        mask = _mask(torch.ones(len(query), query.shape[2], dtype=torch.bool, device=query.device))
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).mean(1), mask[:, 0]
