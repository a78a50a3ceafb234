"""Rows that stand for the tokens after a text before these are known: prompt tokens, or pseudo hidden states.

Row i after a token at position t has position t + i, sees the text up to t and the rows before it, and guesses
the token at position t + i + 1. Here several such groups after one text are trained at once.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.algorithms.draft_heads.head_training import HeadBatch, ahead
from playground.contract.token_tree import ROOT, TokenTree

if TYPE_CHECKING:
    from playground.contract import Lane
    from playground.contract.interfaces import RowsInterface
    from playground.events import Verdict

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


class ProbedGuesses:
    """The logits after the probes of the last accepted token."""

    def __init__(self) -> None:
        self.logits: Tensor | None = None  # [k, V]
        self._text: list[int] = []  # up to that token

    def read(self, tree: TokenTree, rows: RowsInterface, verdict: Verdict) -> None:
        """Take the guesses of the last accepted node, if this forward had probes there."""
        self.logits = None
        node = verdict.kept[-1] if verdict.kept else ROOT
        if rows.probes is not None and rows.tree is tree and node in tree.probes:
            counts = {place: len(chain) for place, chain in tree.probes.items()}
            before = sum(counts[place] for place in list(counts)[:list(counts).index(node)])
            self.logits = rows.probes[before:before + counts[node]]
            self._text = rows.committed + tree.prefix(node)

    def after(self, lm: Lane) -> Tensor:
        """The guesses [k, V] of the tokens after the text, if the last forward belongs to it. Those of tokens that are
        known already, because a grammar forced them, are left out.
        """
        unread = lm.target.behind()
        if self.logits is None or self._text != lm.tokens[:-unread]:
            return torch.empty(0, lm.vocabulary)
        return self.logits[unread - 1:]
