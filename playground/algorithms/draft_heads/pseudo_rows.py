"""Rows that stand for the tokens after a text before these are known: prompt tokens, or pseudo hidden states.

Row i after a token at position t has position t + i, sees the text up to t and the rows before it, and guesses
the token at position t + i + 1. Here several such groups after one text are trained at once.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from playground.algorithms.draft_heads.head_training import HeadBatch, ahead

CUTS = 8  # groups in a text


class RowGroups(NamedTuple):
    """Groups of `size` rows after some tokens of each text."""

    cuts: Tensor  # positions of these tokens, [texts, groups]
    valid: Tensor  # bool [texts, groups]: a short text has fewer groups
    size: int

    @property
    def positions(self) -> Tensor:
        """[texts, groups * size]"""
        return (self.cuts[:, :, None] + torch.arange(1, self.size + 1)).flatten(1)

    def seen(self, tokens: int) -> Tensor:
        """Which tokens of the text, and then which rows, each row attends to: [texts, rows, tokens + rows]."""
        count = self.cuts.shape[1] * self.size
        text = torch.arange(tokens) <= self.cuts.repeat_interleave(self.size, 1)[:, :, None]
        group = torch.arange(count) // self.size
        own = (group[:, None] == group) & torch.ones(count, count, dtype=torch.bool).tril()
        return torch.cat([text, own.expand(len(text), -1, -1)], 2)

    def each(self, rows: Tensor, batch: HeadBatch, depth: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each row of a group: its outputs [n, width] of `rows` [texts, rows, width], the target's own inputs of
        the lm_head there, and the right tokens [n], where the target wrote them.
        """
        last = batch.ids.shape[1] - 1
        for number in range(self.size):
            at = self.cuts + number + 1
            known = self.valid & (at < last)
            at = at.clamp(max=last - 1)
            known = known & batch.written.gather(1, at + 1)
            texts = torch.arange(len(at))[:, None].expand_as(at)[known]
            at = at[known]
            yield rows[:, number::self.size][known], batch.states[depth][texts, at], batch.ids[texts, at + 1]


def row_groups(batch: HeadBatch, size: int) -> RowGroups:
    """Groups after random tokens of each text, of which the target wrote the token after the next one."""
    places = ahead(batch, 2)[0]
    chance = batch.chance or torch.Generator().manual_seed(0)
    order = torch.rand(places.shape, generator=chance).masked_fill(~places, -1.0)
    found, cuts = order.topk(min(CUTS, places.shape[1]))
    return RowGroups(cuts, found >= 0, size)
