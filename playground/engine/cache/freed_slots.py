"""Positions that a KV cache has freed since it was last asked."""
from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import numpy
import torch
from torch import Tensor


@dataclass
class FreedSlots:
    """Evictions of one KV cache since its contents were reported, when it held `length` tokens.

    Only references are collected during a commit; `positions` copies them to the host once for all layers.
    """

    length: int
    count: int = 0  # slots freed
    _heads: list[tuple[int, int]] = field(default_factory=list)  # layer entry and head of each row that is collected
    _positions: list[Tensor] = field(default_factory=list)  # [slots], one after the other for all of these
    _freed: list[Tensor] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _known: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # positions that the host knows already

    def note_one_each(self, entry: int, freed: list[int], positions: list[int]) -> None:
        """Of each head of a layer, or of all layers, at most one slot is being freed: how many, and its position."""
        self.count += sum(freed)
        heads = enumerate(zip(freed, positions))
        self._known |= {(entry, head): [position] for head, (count, position) in heads if count}

    def note(self, entry: int, positions: Tensor, freed: Tensor, count: int) -> None:
        """`count` slots of a layer, or of all layers, are being freed: those at positions [1 or kv_heads, slots] where
        `freed` is true.
        """
        self.count += count
        for head in range(len(freed)):
            self._heads.append((entry, head))
            self._counts.append(freed.shape[1])
        self._positions.append(positions.expand_as(freed).flatten())
        self._freed.append(freed.flatten())

    @property
    def empty(self) -> bool:
        return not self._freed and not self._known

    def positions(self) -> dict[tuple[int, int], list[int]]:
        """Freed positions in ascending order, by layer entry and head; those without any are left out."""
        return dict(sorted({**self._known, **self._read()}.items()))

    def _read(self) -> dict[tuple[int, int], list[int]]:
        if not self._freed:
            return {}
        freed = torch.cat(self._freed)
        # a GPU would wait for the number of entries
        places = (freed.nonzero_static(size=self.count) if freed.is_cuda else freed.nonzero())[:, 0]
        freed, positions = torch.stack([places, torch.cat(self._positions)[places]]).tolist()
        rows = numpy.searchsorted(numpy.cumsum(self._counts), freed, side="right").tolist()
        by_row = groupby(zip(rows, positions), key=itemgetter(0))
        return {self._heads[row]: [position for _, position in group] for row, group in by_row}
