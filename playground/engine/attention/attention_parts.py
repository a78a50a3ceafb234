"""The attention weights and the rotary embedding of a network, for cache policies that need more than states."""
from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Projections(NamedTuple):
    """Weights of the attention of one layer, as its linear layers hold them."""

    query: Tensor  # [heads * head_dim, width]
    key: Tensor  # [kv_heads * head_dim, width]
    value: Tensor  # [kv_heads * head_dim, width]
    output: Tensor  # [width, heads * head_dim]


class AttentionParts(Protocol):
    """The network whose cache a policy manages."""

    @property
    def depth(self) -> int:
        """Decoder layers."""

    @property
    def width(self) -> int:
        """Of the hidden states."""

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normalised between their projection and the rotary embedding."""

    def attention_projections(self, layer: int) -> Projections:
        """The weights of the attention of a layer."""

    def attention_input(self, layer: int, hidden: Tensor) -> Tensor:
        """What the projections of a layer multiply, [n, width], from the layer's input [n, width]."""

    def rotate(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Query or key states [heads, n, head_dim] rotated by so many positions [n]."""

    def rotate_back(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Query or key states [heads, n, head_dim] rotated back by so many positions [n]."""
