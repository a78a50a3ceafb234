"""The static inputs of a recorded forward."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor

from playground.engine.graphs.graph_sizes import Bucket

if TYPE_CHECKING:
    from playground.engine.attention.segment_attention import Segment


class TextRows(NamedTuple):
    """New rows of one text: their tokens, and their segment."""

    tokens: list[int]
    segment: Segment


class GraphInputs:
    """Static inputs of a forward of one size. The rows of all places are in one row of tensors, place by place.

    ids, positions, slots: [places * rows] each. Slots are counted through all places.
    seen [places, rows, slots]: what each row may attend to in its own place.
    follows [places * rows]: 1 for rows that `advance` moves on by one token, 0 for padding.

    All are built on the host and copied in two transfers, which may still be in progress when `fill` returns.
    """

    def __init__(self, size: Bucket, device: torch.device):
        self.size = size
        rows, pinned = size.places * size.rows, device.type == "cuda"
        self._staged = (
            torch.zeros(4, rows, dtype=torch.long, pin_memory=pinned),
            torch.zeros(size.places, size.rows, size.slots, dtype=torch.bool, pin_memory=pinned),
        )
        self._static = [staged if device.type == "cpu" else staged.to(device) for staged in self._staged]
        (self.ids, self.positions, self.slots, self.follows), self.seen = self._static
        self._copied = torch.cuda.Event() if pinned else None

    def fill(self, texts: dict[int, TextRows]) -> None:
        """Set the inputs to the rows of texts by place, each followed by padding."""
        numbers, seen = self._padding()
        for place, text in texts.items():
            self._fill_place(numbers[:, place], seen[place], place, text)
        self._copy()

    def advance(self, chosen: Tensor) -> None:
        """Move every text, which has one row, on by a token of `chosen` [places]; padding stays."""
        self.ids.copy_(chosen)
        self.positions.add_(self.follows)
        self.slots.add_(self.follows)
        self.seen.view(-1).index_fill_(0, self.slots, True)

    def copy(self) -> list[Tensor]:
        """What is in the static tensors."""
        return [static.clone() for static in self._static]

    def restore(self, held: list[Tensor]) -> None:
        for static, before in zip(self._static, held):
            static.copy_(before)

    def _fill_place(self, numbers: numpy.ndarray, seen: numpy.ndarray, place: int, text: TextRows) -> None:
        segment = text.segment
        rows, trunk, before = segment.rows, segment.store.slots_of(0).count, place * self.size.slots
        new = range(before + trunk + segment.first, before + trunk + segment.end)
        numbers[:, :rows] = text.tokens, segment.positions, new, [1] * rows
        seen[:rows, -1] = False
        seen[:rows, :trunk] = True
        seen[:rows, trunk:trunk + segment.end] = segment.ancestors()

    def _padding(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The staged inputs, [4, places, rows] and [places, rows, slots], with padding in all rows."""
        self._wait_for_copies()
        size = self.size
        numbers, seen = (staged.numpy() for staged in self._staged)
        numbers = numbers.reshape(4, size.places, size.rows)
        numbers[:] = 0
        numbers[2] = numpy.arange(1, size.places + 1)[:, None] * size.slots - 1  # the spare slot of each place
        seen[:] = False
        seen[:, :, -1] = True  # attention to nothing would be NaN
        return numbers, seen

    def _copy(self) -> None:
        for staged, static in zip(self._staged, self._static):
            if static is not staged:
                static.copy_(staged, non_blocking=True)
        if self._copied:
            self._copied.record(torch.cuda.current_stream(self.ids.device))

    def _wait_for_copies(self) -> None:
        """Before the staged inputs are overwritten. The host has mostly read what the last forward computed by then."""
        if self._copied and not self._copied.query():
            self._copied.synchronize()
