"""Random numbers of a layer's tokens that depend on neither the order of the work nor on how it is divided."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from playground.contract import Held

CHUNK = 256  # positions drawn together, so that numbers do not depend on how many tokens are committed at once


class DrawnNumbers:
    """A uniform random number for every layer, KV head and position, equal in all copies of a policy."""

    def __init__(self, seed: int):
        self.seed = seed
        self._drawn: dict[int, Tensor] = {}  # by layer, [kv_heads, positions]
        self._heads = 0  # KV heads of a text

    def of(self, held: Held, heads: int) -> Tensor:
        """The numbers of the slots of a layer that has `heads` KV heads, those of several texts included, [heads,
        slots]; arbitrary for empty slots.
        """
        drawn = self._drawn.get(held.layer)
        if drawn is None or drawn.shape[1] <= held.next:
            drawn = self._drawn[held.layer] = self._draw(held, heads)
        return drawn.gather(1, held.positions.clamp(min=0).expand(len(drawn), -1))

    def for_heads(self, layer: int, heads: Tensor) -> DrawnNumbers:
        """The numbers of one layer, for copies of these heads [n]."""
        alone = DrawnNumbers(self.seed)
        alone._heads = self._heads
        alone._drawn = {layer: self._drawn[layer][heads]} if layer in self._drawn else {}
        return alone

    def _draw(self, held: Held, heads: int) -> Tensor:
        """Numbers of a layer's positions, at least up to the next row's, [heads, n * CHUNK]; equal for all texts."""
        self._heads = self._heads or heads  # the prompt is one text
        chunks = [self._chunk(held.layer, at) for at in range(held.next // CHUNK + 1)]
        return torch.cat(chunks, 1).repeat(heads // self._heads, 1).to(held.positions.device)

    def _chunk(self, layer: int, at: int) -> Tensor:
        """Numbers of a layer's positions from at * CHUNK on, [heads of a text, CHUNK]."""
        generator = torch.Generator().manual_seed((self.seed << 12 | layer) << 12 | at)
        return torch.rand(self._heads, CHUNK, generator=generator)
