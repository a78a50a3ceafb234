"""Hidden states of the committed tokens that a stream's model has read, for drafters that continue from them.

They come from the forwards that the stream runs anyway. States of draft tokens wait until one path of them is
committed; those of rejected draft tokens are dropped, as in the KV cache.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from playground.engine.model import Model

Captured = dict[int, Tensor]
"""Hidden states before a layer, [rows, hidden_size], by layer; the model's depth means after the last layer."""


class StatesPart(NamedTuple):
    """Hidden states of consecutive tokens of the text."""

    first: int  # position of the first
    rows: Captured

    @property
    def end(self) -> int:
        return self.first + len(next(iter(self.rows.values())))

    def between(self, start: int, end: int) -> StatesPart:
        """Its tokens from position `start` up to `end`."""
        start = max(start, self.first)
        within = slice(start - self.first, end - self.first)
        return StatesPart(start, {layer: rows[within] for layer, rows in self.rows.items()})


class CommittedStates:
    """Hidden states before some layers, one row for each committed token read, from position `start` on."""

    def __init__(self, model: Model, layers: tuple[int, ...]):
        self._model, self.layers = model, layers
        self._parts: list[StatesPart] = []  # consecutive
        self.kept = True  # whether anything reads them more than once
        self._scratch: list[Captured] = []  # of draft tokens, in the order of the scratch nodes

    @property
    def start(self) -> int:
        """Position of the first token whose states are known."""
        return self._parts[0].first if self._parts else 0

    @property
    def length(self) -> int:
        """Position after the last token whose states are known."""
        return self._parts[-1].end if self._parts else 0

    def of(self, layer: int, start: int = 0) -> Tensor:
        """The inputs [n, hidden_size] of a layer for the tokens from position `start` on; at the model's depth the
        inputs of the lm_head, after the final norm.
        """
        parts = [part.between(start, part.end).rows[layer] for part in self._parts if part.end > start]
        if not parts:
            return torch.empty(0, self._model.width, dtype=self._model.dtype, device=self._model.device)
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._model.normed(rows) if layer == self._model.depth else rows

    def read(self, captured: Captured, first: int, committed: int) -> None:
        """Add what a forward captured: of `committed` tokens of the text from position `first` on, then of draft
        tokens.
        """
        if not self.layers:
            return
        self.crop(first)
        if first > self.length:  # the tokens before were not read in every layer
            self._parts = []
        rows = {layer: captured[layer] for layer in self.layers}
        if committed:
            self._parts.append(StatesPart(first, {layer: states[:committed] for layer, states in rows.items()}))
        count = len(rows[self.layers[0]])
        self._scratch += [
            {layer: states[row:row + 1] for layer, states in rows.items()} for row in range(committed, count)
        ]

    def forget(self) -> None:
        """Drop all but the last token's, unless they are kept."""
        if self._parts and not self.kept:
            last = self._parts[-1]
            self._parts = [last.between(last.end - 1, last.end)]

    def commit(self, path: list[int]) -> None:
        """Draft tokens, by scratch node, have become text; all others are dropped."""
        for node in path if self.layers else ():
            self._parts.append(StatesPart(self.length, self._scratch[node]))
        self._scratch = []

    def prune(self, nodes: list[int]) -> None:
        """Keep only these draft tokens."""
        self._scratch = [self._scratch[node] for node in nodes] if self.layers else []

    def crop(self, length: int) -> None:
        """Drop the states from position `length` on."""
        while self._parts and self._parts[-1].first >= length:
            self._parts.pop()
        if self.length > length:
            self._parts.append(self._parts.pop().between(0, length))
