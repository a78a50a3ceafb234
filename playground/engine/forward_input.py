"""The input of a forward: tokens, their place in the KV cache, and which rows of logits to return."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from playground.engine.attention.segment_attention import Segment
from playground.engine.cache.kv_cache import KVCache

Expected = Literal["", "best", "drawn"]
"""What the next input after one row is expected to be: its most probable token, one that the lane draws, or unknown."""

Blend = tuple[list[int], list[float]]
"""Tokens and weights: a row whose input embedding is the weighted mean of these tokens' embeddings."""


@dataclass
class ForwardInput:
    """The input of one lane in a forward: new scratch nodes of its KV cache, or nodes that only some layers have read.
    """

    store: KVCache
    tokens: list[int]
    parents: list[int]  # scratch nodes; -1 is the end of the trunk
    last_only: bool = False  # return only the last row of logits
    again: bool = False  # the rows are the last nodes of the scratch already
    blends: dict[int, Blend] = field(default_factory=dict)  # by row
    embeds: dict[int, Tensor] = field(default_factory=dict)  # by row: an input [hidden_size] in place of the token's
    watch: Callable[[int], bool] | None = None  # by position: whether the row's attention weights are recorded
    expected: Expected = ""
    given: Tensor | None = None  # token ids of its last rows, [n] on the device, for which `tokens` are placeholders

    def __post_init__(self) -> None:
        scratch = len(self.store.parents) - (len(self.tokens) if self.again else 0)
        self.start = self.store.length  # committed tokens before its rows, evicted ones included
        self.context = self.start + scratch  # these and the scratch nodes before its rows

    def segment(self) -> Segment:
        segment = self._segment()
        if self.watch:
            positions = enumerate(segment.positions)
            segment.watched = [row for row, at in positions if self.watch(at) and row not in self.embeds]
        return segment

    def _segment(self) -> Segment:
        return self.store.again(len(self.tokens)) if self.again else self.store.extend(self.parents)


@dataclass
class LateInput(ForwardInput):
    """Tokens of a shortened prompt, for layers that have not read them. The plan has their hidden states."""

    first: int = 0  # slot of the first token
    positions: list[int] = field(default_factory=list)  # true positions, ascending

    def __post_init__(self) -> None:
        self.start, self.context = self.positions[0], self.first

    def _segment(self) -> Segment:
        return self.store.late(self.first, self.positions)
