"""Attention along some columns and diagonals of the attention matrix, whose other cells are not computed."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from playground.engine.attention.attention_logits import attention_logits
from playground.engine.attention.eager_attention import Scoring, softmax_of
from playground.engine.cache.kv_buffer import selected_indices


class AttentionLines(NamedTuple):
    """Columns (one token, for all rows) and diagonals (one distance, for all rows) of each KV head."""

    columns: Tensor  # bool [kv_heads, m]
    diagonals: Tensor  # by distance, bool [kv_heads, length]

    @property
    def most(self) -> int:
        """Lines of the head with most columns and of that with most diagonals: the products of a query."""
        return sum(int(part.sum(1).max()) for part in self)

    def mask(self, query_positions: Tensor) -> Tensor:
        """The cells on a line of rows at these positions [n], bool [kv_heads, n, m]; slots are at their own index."""
        slots = torch.arange(self.columns.shape[1], device=query_positions.device)
        distance = query_positions[:, None] - slots
        return (self.columns[:, None] | self.diagonals[:, distance.clamp(min=0)]) & (distance >= 0)


class Cells(NamedTuple):
    """The cells of rows on some lines: a column is one token for all rows, a diagonal another one for each."""

    slots: Tensor  # of columns [kv_heads, c], or of diagonals [kv_heads, n, c]
    seen: Tensor  # which of them a row attends to, bool [kv_heads, n, c]


def attend_lines(query: Tensor, held: tuple[Tensor, Tensor], lines: AttentionLines, seen: Tensor, scaling: float,
                 scoring: Scoring | None) -> Tensor:
    """Attention of rows [heads, n, d] over those keys and values [kv_heads, m, d] that lie on lines, [heads, n, d].

    `seen` [kv_heads, n, m] are the cells on lines that the rows may see; the last row is that of the last slot.
    """
    keys, values = held
    (kv_heads, slots, _), (heads, rows, d) = keys.shape, query.shape
    query = query.view(kv_heads, heads // kv_heads, rows, d)
    columns, diagonals = _columns(lines, seen), _diagonals(lines, seen, slots - rows)
    at_columns = [_taken(part, columns.slots) for part in (keys, values)]
    at_diagonals = [_taken(part, diagonals.slots) for part in (keys, values)]
    scores = torch.cat([
        attention_logits(query.flatten(1, 2), at_columns[0]).view(*query.shape[:3], -1),
        torch.einsum("kgnd,kncd->kgnc", query, at_diagonals[0]),
    ], -1) * scaling
    visible = torch.cat([columns.seen, diagonals.seen], 2)[:, None].expand_as(scores)
    weights = softmax_of(scores.flatten(1, 2), visible.flatten(1, 2), scoring).view_as(scores).to(values.dtype)
    of_columns, of_diagonals = weights.split([columns.slots.shape[1], diagonals.slots.shape[2]], -1)
    output = (of_columns.flatten(1, 2) @ at_columns[1]).view_as(query)
    return (output + torch.einsum("kgnc,kncd->kgnd", of_diagonals, at_diagonals[1])).reshape(heads, rows, d)


def _columns(lines: AttentionLines, seen: Tensor) -> Cells:
    slots = selected_indices(lines.columns)
    chosen = lines.columns.gather(1, slots)[:, None]
    return Cells(slots, seen.gather(2, slots[:, None].expand(-1, seen.shape[1], -1)) & chosen)


def _diagonals(lines: AttentionLines, seen: Tensor, first: int) -> Cells:
    """Cells on diagonals; one that lies on a column, too, is left to that. `first` is the position of the first row."""
    distances = selected_indices(lines.diagonals)
    chosen = lines.diagonals.gather(1, distances)[:, None]
    positions = first + torch.arange(seen.shape[1], device=seen.device)
    slots = positions[:, None] - distances[:, None]
    inside, slots = slots >= 0, slots.clamp(min=0)
    others = ~lines.columns[:, None].expand_as(seen)
    return Cells(slots, (seen & others).gather(2, slots) & inside & chosen)


def _taken(states: Tensor, slots: Tensor) -> Tensor:
    """States [kv_heads, m, d] at slots [kv_heads, ...], [kv_heads, ..., d]."""
    heads = torch.arange(len(states), device=states.device).view(-1, *[1] * (slots.dim() - 1))
    return states[heads, slots]
