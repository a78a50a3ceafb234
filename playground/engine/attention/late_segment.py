"""Rows of a shortened prompt in the layers that have not read them."""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from playground.engine.attention.attention_mask import Reach
from playground.engine.attention.segment_attention import Segment
from playground.engine.attention.segment_masks import LateMasks, SegmentMasks
from playground.engine.host_copies import on_device


@dataclass
class LateSegment(Segment):
    """Trunk tokens that earlier layers have read and later layers read now, after a policy shortened the prompt.

    They are written to the slots from `first` on, at their true positions. Each sees the tokens before it that
    reached these layers.
    """

    token_positions: list[int] = field(default_factory=list)  # true positions, ascending

    def _true_positions(self) -> list[int]:
        return self.token_positions

    @cached_property
    def masks(self) -> SegmentMasks:
        return LateMasks(self.store, self.first, self.positions)

    def is_plain(self, sliding_window: Reach) -> bool:
        return False

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.store.keys[layer].write(self.first, keys), self.store.values[layer].write(self.first, values)

    def watch(self, layer: int, weights: Tensor) -> None:
        """Report the attention at once, because the tokens are committed already."""
        if self.store.on_attention:
            watched = on_device([self.token_positions[row] for row in self.watched], self.store.device)
            weights = weights.to(self.store.device)
            self.store.on_attention(layer, weights, watched, self.masks.slot_positions(layer))
