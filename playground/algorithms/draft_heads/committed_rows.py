"""The rows that causal layers of a draft head have read of the text, which follow the text as it grows and changes."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.draft_heads.head_layers import HeadCache, NewRows

if TYPE_CHECKING:
    from playground.contract import Lane

CHUNK = 512  # tokens of the text that a head reads at once

Read = Callable[[range, list[NewRows]], Tensor]
"""Outputs [n, width] of a head for tokens at consecutive positions, given a place in each layer's cache."""


class CommittedRows:
    """One row for each token that the target has read, in a cache for each layer.

    Row i depends on the target's states up to token i and on `ahead` tokens after it. Rows of tokens that are no longer
    in the text, and those of draft tokens, are dropped before new ones are read. The first `skip` tokens have no rows.
    """

    def __init__(self, layers: int = 1, ahead: int = 0, skip: int = 0):
        self.caches, self._ahead, self._skip = [HeadCache() for _ in range(layers)], ahead, skip
        self._first, self._read = 0, []  # position of the first row, and the tokens on which the rows depend

    def catch_up(self, lm: Lane, read: Read) -> Tensor:
        """Read what the target has read since the last round; returns the output [1, width] for its newest token."""
        states, device = lm.target.states, lm.target_model.device
        start = max(states.start, self._skip)
        kept = self._kept(start, lm.tokens[start:states.length + self._ahead])
        kept = min(kept, states.length - start - 1)  # the last row is read again if nothing is new
        for cache in self.caches:
            cache.crop(kept)
        output = torch.empty(0)
        for first in range(start + kept, states.length, CHUNK):
            span = range(first, min(first + CHUNK, states.length))
            positions = torch.arange(span.start, span.stop, device=device)
            output = read(span, [NewRows(cache, positions) for cache in self.caches])
            for cache in self.caches:
                cache.commit()
        return output[-1:]

    def _kept(self, first: int, tokens: list[int]) -> int:
        """How many rows still belong to the text, which has these tokens from position `first` on."""
        before, moved = self._read, first != self._first
        self._first, self._read = first, tokens
        if moved:
            return 0
        if tokens[:len(before)] == before:
            return max(0, len(before) - self._ahead)
        same = next((i for i, pair in enumerate(zip(tokens, before)) if pair[0] != pair[1]), len(tokens))
        return max(0, same - self._ahead)
