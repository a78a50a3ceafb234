"""The plain forward of a fused network over static memory, in as few kernels as it takes."""
from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.nn.functional import embedding

from playground.engine.attention.split_keys import kernel_for
from playground.engine.graphs.layer_kernels import HeadNorms, add_norm, gated, rotate_and_store

if TYPE_CHECKING:
    from playground.engine.graphs.fused_llama import FusedLayer, FusedLlama
    from playground.engine.graphs.graph_inputs import GraphInputs


class StaticAttention(Protocol):
    """Attention over static memory (`GraphSegment`)."""

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [kv_heads, places * slots, d] each."""

    def attend_held(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attention of queries [heads, n, d] over them, of the same shape."""


def runs_for(network: FusedLlama) -> bool:
    """Whether the kernels run for this network on its device."""
    return all(kernel_for(network.embeddings[None, :1, :layer.head_dim]) is not None and _is_even(layer)
               for layer in network.layers)


def _is_even(layer: FusedLayer) -> bool:
    return layer.head_dim % 2 == 0 and len({norm.epsilon for norm in layer.head_norms}) <= 1


def recorded_forward(
    network: FusedLlama, inputs: GraphInputs, attention: StaticAttention, capture: frozenset[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits [rows, V], and the inputs [rows, d] of captured layers; after the last one, of the final norm."""
    hidden, added, captured = embedding(inputs.ids, network.embeddings), None, {}
    for layer in network.layers:
        hidden, normed = add_norm(hidden, added, layer.input_norm.weight, layer.input_norm.epsilon)
        if layer.index in capture:
            captured[layer.index] = hidden
        mixed = _attention(network, layer, normed, inputs, attention)
        hidden, normed = add_norm(hidden, layer.out(mixed), layer.mlp_norm.weight, layer.mlp_norm.epsilon)
        added = layer.ffn.down(gated(layer.ffn.gate_up(normed)))
    hidden, normed = add_norm(hidden, added, network.norm.weight, network.norm.epsilon)
    if network.depth in capture:
        captured[network.depth] = hidden
    return network.head(normed), captured


def _attention(
    network: FusedLlama, layer: FusedLayer, normed: Tensor, inputs: GraphInputs, attention: StaticAttention
) -> Tensor:
    """Attention of the new rows before the output projection, [rows, heads * d]."""
    norms = HeadNorms(*(norm.weight for norm in layer.head_norms), layer.head_norms[0].epsilon) if (
        layer.head_norms) else None
    query = rotate_and_store(layer.qkv(normed), (network.cos, network.sin), inputs.positions, inputs.slots,
                             attention.held(layer.index), norms)
    mixed = attention.attend_held(layer.index, query.transpose(0, 1), layer.scaling)
    return mixed.transpose(0, 1).reshape(len(normed), -1)
