"""States of a canvas that are computed again from the first layer on whose attention has changed.

In each layer the filled positions that get most of the attention are tracked. A forward computes some positions only;
once the attention of the tracked positions differs from that of the forward before, the layers after it compute all.
Elastic-Cache: Nguyen-Tri et al. 2025, arXiv 2510.14973.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

AXES = {"keys": -1, "heads": 0}  # of attention weights [heads, queries, keys]


@dataclass
class AttentionDrift:
    """Keeps the inputs and queries of every layer, beside the key and value states of a canvas (`states`, which it
    observes). Positions count from the start of the prompt.

    gamma: cosine similarity below which attention counts as changed. tracked: positions per layer. axis: along which
    axis of the weights the cosine is taken.
    """

    states: Any
    gamma: float = 0.9
    tracked: int = 1
    axis: str = "keys"
    inputs: list[Tensor] = field(default_factory=list)  # by layer, hidden states before it [positions, hidden_size]
    queries: list[Tensor] = field(default_factory=list)  # by layer, rotated and scaled [heads, positions, head_dim]
    similarity: list[float] = field(default_factory=list)  # of this forward, by layer, up to the one that changed
    boundary: int | None = None  # the first layer of this forward that computes everything
    watched: list[int] = field(default_factory=list)  # tracked positions of all layers, which are computed
    most_attended: dict[int, list[int]] = field(default_factory=dict)  # by layer, in its last forward
    _window: list[int] = field(default_factory=list)
    _masked: list[int] = field(default_factory=list)
    _before: list[Tensor] = field(default_factory=list)  # by layer, attention of `watched` in the last forward

    def __post_init__(self) -> None:
        self.states.observer = self

    @property
    def depth(self) -> int:
        """Number of layers, once a forward has run."""
        return len(self.states.keys)

    def begin(self, window: list[int], masked: list[int], everything: bool = False) -> None:
        """Before a forward: the masked positions that it predicts, all masked ones, and whether it computes everything.
        """
        self.watched = sorted({position for positions in self.most_attended.values() for position in positions})
        self._before = [self._attention(layer, self.watched) for layer in range(self.depth)]
        self._window, self._masked, self.similarity = window, masked, []
        self.boundary = 0 if everything else None

    def enter(self, layer: int, at: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the hidden states; from the boundary on, all positions are computed."""
        if layer == len(self.inputs):
            self.inputs.append(hidden.new_zeros(len(self.states.present), hidden.shape[1]))
        self.inputs[layer][at] = hidden
        if layer != self.boundary:
            return at, hidden
        return torch.arange(len(self.states.present), device=at.device), self.inputs[layer]

    def attended(self, layer: int, at: Tensor, queries: Tensor) -> None:
        """Test whether attention has changed, and find the most attended positions."""
        if layer == len(self.queries):
            self.queries.append(queries.new_zeros(len(queries), len(self.states.present), queries.shape[2]))
        self.queries[layer][:, at] = queries
        if self.boundary is None and self.watched:
            self._test(layer)
        self.most_attended[layer] = self._top(layer)

    def _test(self, layer: int) -> None:
        """Attention that changed in a layer makes the next layers compute everything."""
        now = self._attention(layer, self.watched)
        self.similarity.append(float(torch.cosine_similarity(now, self._before[layer], AXES[self.axis]).mean()))
        if self.similarity[-1] < self.gamma:
            self.boundary = layer + 1

    def _top(self, layer: int) -> list[int]:
        """The filled positions that get most of the attention of the window."""
        attention = self._attention(layer, self._window).sum((0, 1))
        attention[self._masked] = -1
        return attention.topk(min(self.tracked, len(attention) - len(self._masked))).indices.tolist()

    def _attention(self, layer: int, positions: list[int]) -> Tensor:
        """Attention weights of some positions, [heads, len(positions), all positions]."""
        queries, keys = self.queries[layer][:, positions], self.states.keys[layer]
        return (queries @ keys.repeat_interleave(len(queries) // len(keys), 0).mT).softmax(-1)
