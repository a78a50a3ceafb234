"""The static inputs of a recorded forward."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor

from playground.engine.graphs.graph_sizes import Bucket

if TYPE_CHECKING:
    from playground.engine.attention.segment_attention import Segment

MOST_STAGINGS = 16  # forwards of one size whose inputs the host prepares before the first of them has begun


class TextRows(NamedTuple):
    """New rows of one text: their tokens, their segment, and those tokens that only the device knows."""

    tokens: list[int]
    segment: Segment
    given: Tensor | None = None  # of the last rows


class Staging(NamedTuple):
    """Inputs on the host, and an event after they were copied to the device."""

    numbers: Tensor
    seen: Tensor
    copied: torch.cuda.Event | None

    def is_free(self) -> bool:
        """Whether they may be overwritten."""
        return self.copied is None or self.copied.query()


class GraphInputs:
    """Static inputs of a forward of one size. The rows of all places are in one row of tensors, place by place.

    ids, positions, slots: [places * rows] each. Slots are counted through all places.
    seen [places, rows, slots]: what each row may attend to in its own place.
    follows [places * rows]: 1 for rows that `advance` moves on by one token, 0 for padding.

    All are built on the host and copied in two transfers, which may still be in progress when `fill` returns. So there
    are further places on the host for forwards that are launched without waiting for the earlier ones.
    """

    def __init__(self, size: Bucket, device: torch.device):
        self.size = size
        self._pinned = device.type == "cuda"
        self._stagings = [self._new_staging()]
        staged = self._stagings[0][:2]
        self._static = [each if device.type == "cpu" else each.to(device) for each in staged]
        (self.ids, self.positions, self.slots, self.follows), self.seen = self._static

    def _new_staging(self) -> Staging:
        size, pinned = self.size, self._pinned
        return Staging(
            torch.zeros(4, size.places * size.rows, dtype=torch.long, pin_memory=pinned),
            torch.zeros(size.places, size.rows, size.slots, dtype=torch.bool, pin_memory=pinned),
            torch.cuda.Event() if pinned else None,
        )

    def fill(self, texts: dict[int, TextRows]) -> None:
        """Set the inputs to the rows of texts by place, each followed by padding."""
        staging = self._free_staging()
        numbers, seen = self._padding(staging)
        for place, text in texts.items():
            self._fill_place(numbers[:, place], seen[place], place, text)
        self._copy(staging)
        for place, text in texts.items():
            if text.given is not None:
                end = place * self.size.rows + text.segment.rows
                self.ids[end - len(text.given):end].copy_(text.given)

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

    def _padding(self, staging: Staging) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The staged inputs, [4, places, rows] and [places, rows, slots], with padding in all rows."""
        size, numbers, seen = self.size, staging.numbers.numpy(), staging.seen.numpy()
        numbers = numbers.reshape(4, size.places, size.rows)
        numbers[:] = 0
        numbers[2] = numpy.arange(1, size.places + 1)[:, None] * size.slots - 1  # the spare slot of each place
        seen[:] = False
        seen[:, :, -1] = True  # attention to nothing would be NaN
        return numbers, seen

    def _copy(self, staging: Staging) -> None:
        for staged, static in zip(staging, self._static):
            if static is not staged:
                static.copy_(staged, non_blocking=True)
        if staging.copied:
            staging.copied.record(torch.cuda.current_stream(self.ids.device))

    def _free_staging(self) -> Staging:
        """A place on the host that is not being copied, in turn. With many the oldest is waited for."""
        staging = next((staging for staging in self._stagings if staging.is_free()), None)
        if staging is None and len(self._stagings) < MOST_STAGINGS:
            staging = self._new_staging()
        elif staging is None:
            staging = self._stagings[0]
            staging.copied.synchronize()
        self._stagings = [*(other for other in self._stagings if other is not staging), staging]
        return staging
