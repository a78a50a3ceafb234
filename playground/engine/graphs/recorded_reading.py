"""What the host reads of a row of logits, recorded."""
from __future__ import annotations

import logging
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from playground.engine.graphs.graph_recorders import Record, Run
from playground.engine.row_numbers import row_numbers

log = logging.getLogger(__name__)


class RecordedRow(NamedTuple):
    """A recorded `row_numbers` with its static input [1, V] and result."""

    raw: Tensor
    numbers: Tensor
    run: Run


class RecordedReading:
    """`row_numbers` of one row, whose twenty small operations are launched at once.

    It runs beside forwards that were launched ahead, so its recorder must not share memory with theirs.
    """

    def __init__(self, record: Record):
        self._record, self._recorded, self._refused = record, {}, False
        self._lock = Lock()  # several threads read rows, and the input is static

    def __call__(self, raw: Tensor, count: int) -> Tensor:
        """As `row_numbers`; rows [n, V] of more than one are not recorded, nor is any without memory for it."""
        if len(raw) == 1 and not self._refused:
            try:
                return self._replayed(raw, count)
            except torch.OutOfMemoryError as reason:
                log.warning("no memory to record what is read of a row: %s", reason)
                self._refused = True
        return row_numbers(raw, count)

    def _replayed(self, raw: Tensor, count: int) -> Tensor:
        with self._lock:
            reading = self._reading(raw, count)
            reading.raw.copy_(raw)
            reading.run()
            return reading.numbers.clone()

    def _reading(self, raw: Tensor, count: int) -> RecordedRow:
        key = raw.shape[1], raw.dtype, count
        if key not in self._recorded:
            self._recorded[key] = self._new(raw, count)
        return self._recorded[key]

    def _new(self, raw: Tensor, count: int) -> RecordedRow:
        with torch.inference_mode(False):
            held, numbers = raw.new_zeros(1, raw.shape[1]), raw.new_zeros(1, 2 + 3 * count)
        return RecordedRow(held, numbers, self._record(lambda: numbers.copy_(row_numbers(held, count))))
