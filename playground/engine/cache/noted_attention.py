"""Attention weights of rows whose tokens may still be committed."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from playground.engine.host_copies import index_on


@dataclass
class Attention:
    """Attention weights of the rows of one forward, until it is known which of them are committed.

    Columns are the trunk, then the scratch.
    """

    nodes: list[int]
    layers: dict[int, Tensor]  # [kv_heads, nodes, slots]

    def compact(self, order: Tensor, dead: Tensor, trunk: int, layers: Iterable[int]) -> None:
        """Keep only the columns `order` [1 or kv_heads, n] among the first `trunk` columns of some layers.

        Columns that are `dead`, of the same shape, get no weight.
        """
        for layer in self.layers.keys() & set(layers):
            weights = self.layers[layer]
            index = order[:, None, :].expand(*weights.shape[:2], order.shape[1])
            remaining = weights[:, :, :trunk].gather(2, index).masked_fill_(dead[:, None], 0)
            self.layers[layer] = torch.cat([remaining, weights[:, :, trunk:]], 2)

    def columns(self, layer: int, rows: list[int], trunk: int, order: list[int]) -> Tensor:
        """Weights of some rows, [kv_heads, n, slots], with the columns of the scratch in a new order.

        `order` may name nodes that were fed after the rows, whose columns are zero.
        """
        weights = self.layers[layer]
        if len(rows) < len(self.nodes):
            weights = weights[:, rows]
        known = weights.shape[2] - trunk
        if order == list(range(known)):
            return weights
        scratch = weights[:, :, trunk:]
        padded = torch.cat([scratch, scratch.new_zeros(*scratch.shape[:2], 1)], 2)
        columns = index_on([min(node, known) for node in order], weights.device)
        return torch.cat([weights[:, :, :trunk], padded[:, :, columns]], 2)
