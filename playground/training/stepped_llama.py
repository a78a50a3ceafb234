"""The forward of a model of the Llama family with gradients, for training what a compute policy decides with.

It reads whole texts without a KV cache. What is trained is what a `LayerSteps` puts in place of a layer or of its
feed-forward network.
"""
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from playground.algorithms.differentiable_llama import DifferentiableLlama, FrozenLayer, rotated
from playground.engine.layer_choices import LayerSteps

Angles = tuple[Tensor, Tensor]


class SteppedLlama:
    """A network whose layers may be replaced in part: token ids in, logits out."""

    def __init__(self, network: DifferentiableLlama):
        self.network = network

    def __call__(self, ids: Tensor, steps: LayerSteps) -> Tensor:
        """Logits [texts, n, V] of texts [texts, n] that are padded at the end."""
        network, length = self.network, ids.shape[1]
        hidden, angles = network.embed(ids), (network.cos[:length], network.sin[:length])
        for index, layer in enumerate(network.layers):
            run = partial(self._run, index, layer, angles, steps)
            hidden = steps.layer(index, hidden, run)
        return network.logits(network.norm(hidden))

    def _run(
        self,
        index: int,
        layer: FrozenLayer,
        angles: Angles,
        steps: LayerSteps,
        hidden: Tensor,
        visible: Tensor | None = None,
    ) -> Tensor:
        """A layer's output [texts, n, d]; tokens that are not `visible`, bool [texts, n], are seen by none but
        themselves.
        """
        mask = None if visible is None else _mask(visible)
        query, key, value = layer.states(hidden, None)
        query, key = (rotated(states, *angles) for states in (query, key))
        key, value = (states.repeat_interleave(layer.heads // layer.kv_heads, 1) for states in (key, value))
        if steps.reads_attention:
            steps.attended(index, *_weights(query, key, mask, self.network.scaling))
        mixed = scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=self.network.scaling
        )
        hidden = hidden + layer.out(mixed.transpose(1, 2).flatten(2))
        return hidden + steps.feed_forward(index, layer.norms[1](hidden), layer.feed_forward)


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
