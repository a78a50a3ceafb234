"""A network of the Llama family with other matrices, for weights that a lane trains while it decodes."""
from __future__ import annotations

from collections.abc import Mapping
from copy import copy

from torch import Tensor

from playground.engine.graphs.fused_llama import FeedForward, FusedLayer, FusedLinear, FusedLlama


def with_matrices(network: FusedLlama, matrices: Mapping[str, Tensor]) -> FusedLlama:
    """A network that shares everything with `network` but these matrices.

    They are named "embeddings", "head", or by projection and layer: "qkv.3", "out.3", "gate_up.3" and "down.3".
    """
    other = copy(network)
    other.embeddings = matrices.get("embeddings", network.embeddings).to(network.embeddings)
    other.head = _replaced(network.head, matrices.get("head"))
    other.layers = [_layer(layer, matrices) for layer in network.layers]
    return other


def _layer(layer: FusedLayer, matrices: Mapping[str, Tensor]) -> FusedLayer:
    other = copy(layer)
    other.qkv, other.out, gate_up, down = (
        _replaced(old, matrices.get(f"{name}.{layer.index}"))
        for name, old in zip(("qkv", "out", "gate_up", "down"), layer.linears)
    )
    other.ffn = FeedForward(gate_up, down)
    other.linears = [other.qkv, other.out, gate_up, down]
    return other


def _replaced(old: FusedLinear, weight: Tensor | None) -> FusedLinear:
    if weight is None:
        return old
    new = FusedLinear(weight.to(old.weight), old.bias)
    new.reorder()
    return new
