"""The rows that positions of a canvas were filled from, which its committed tokens are recorded with."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from playground.decoding.recorder import CommittedToken
from playground.decoding.rows import Rows


class FilledRows:
    """By filled position, its logits [V] in the forward before, and its token mask, bool [V]."""

    def __init__(self) -> None:
        self._logits: dict[int, Tensor] = {}
        self._masks: dict[int, Tensor] = {}

    def add(self, position: int, rows: Rows) -> None:
        self._logits[position] = rows.raw[position]
        if rows.masks is not None:
            self._masks[position] = rows.masks[position]

    def committed(self, written: list[int], rows_of: Callable[[Tensor, Tensor | None], Rows]) -> list[CommittedToken]:
        """Each token with the logits of its position in the forward before it was filled; fixed ones have none."""
        index_of = {position: index for index, position in enumerate(self._logits)}
        rows = rows_of(torch.stack([*self._logits.values()]), self._stacked_masks()) if index_of else None
        return [
            CommittedToken(token, "sampled", rows, index_of[position])
            if position in index_of else CommittedToken(token, "forced")
            for position, token in enumerate(written)
        ]

    def _stacked_masks(self) -> Tensor | None:
        """The token masks of all filled positions, bool [n, V]; None without a constraint."""
        if not self._masks:
            return None
        free = torch.ones_like(next(iter(self._masks.values())))
        return torch.stack([self._masks.get(position, free) for position in self._logits])
