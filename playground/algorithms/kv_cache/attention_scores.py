"""Attention received by each token, by true position, and the selection of the slots with the highest scores.

Positions are true positions, so a token's score does not change index when other tokens are evicted.
"""
from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from playground.engine.cache.kv_buffer import MergedTokens
from playground.engine.sampling import REMOVED

CHUNK = 64  # positions by which buffers grow
NO_COLUMN = -1


class AttentionScores:
    """Cumulative attention of each layer, summed over rows and over the query heads of a group."""

    def __init__(self) -> None:
        self._layers: dict[int, Tensor] = {}  # [kv_heads, positions]
        self._last_positions: dict[int, Tensor] = {}  # key positions of the last `add`

    def add(self, layer: int, weights: Tensor, key_positions: Tensor, length: int = 0) -> None:
        """Add weights [kv_heads, rows, slots] of slots at key positions [1 or kv_heads, slots].

        A negative key position marks an empty slot, which has no weight. `length` is that of the text, if known: the
        host would otherwise wait for the largest position.
        """
        received = weights.sum(1)
        total = self._grown(layer, length or int(key_positions.max()) + 1, received)
        index = key_positions.clamp(min=0).expand_as(received)
        self._layers[layer], self._last_positions[layer] = total.scatter_add(1, index, received), key_positions

    def replace(self, layer: int, weights: Tensor, key_positions: Tensor, length: int = 0) -> None:
        """Discard the scores of the layer, then `add`."""
        self._layers.pop(layer, None)
        self.add(layer, weights, key_positions, length)

    def of(self, layer: int, positions: Tensor, length: int = 0) -> Tensor:
        """Scores [kv_heads, slots] of slots at positions [1 or kv_heads, slots]; zero if nothing was added.

        `length` is that of the text, as in `add`.
        """
        if layer not in self._layers or not positions.numel():
            return torch.zeros(positions.shape, device=positions.device)
        total = self._layers[layer]
        if self._last_positions[layer] is not positions:
            total = self._grown(layer, length or int(positions.max()) + 1, total)
        return total.gather(1, positions.clamp(min=0).expand(len(total), -1))

    def move(self, layer: int, moving: MergedTokens) -> None:
        """Add the scores of merged tokens to those of their targets."""
        if layer in self._layers:
            self._layers[layer] = move_scores(self._layers[layer], moving)

    def for_heads(self, layer: int, heads: Tensor) -> AttentionScores:
        """The scores of one layer, for copies of these heads [n], each of which gets what is summed over all heads."""
        alone = AttentionScores()
        if layer in self._layers:
            scores = self._layers[layer]
            alone._layers[layer] = scores[heads] if len(scores) > 1 else scores.expand(len(heads), -1)
            alone._last_positions[layer] = self._last_positions[layer]
        return alone

    def _grown(self, layer: int, length: int, like: Tensor) -> Tensor:
        """The scores of a layer, padded to at least `length` positions."""
        return _grown(self._layers.get(layer, like.new_zeros(len(like), 0)), length)


@dataclass
class AttentionWindow:
    """Attention of the latest rows of one layer, in a ring buffer.

    There is a column for each slot at the time the columns were made, and for the CHUNK positions that follow, so that
    tokens can be appended and evicted for a while without a copy.
    """

    weights: Tensor  # [kv_heads, rows, columns]; a new row overwrites the oldest
    positions: Tensor  # of the columns, [kv_heads, columns]; negative: empty
    rows: int = 0  # rows added so far
    _found: tuple[Tensor, Tensor, Tensor] | None = None  # the last `slots` looked up, their columns, whether they exist

    def __post_init__(self) -> None:
        self.end = int(self.positions.max()) + 1
        numbers = torch.arange(self.positions.shape[1], device=self.positions.device, dtype=torch.int32)
        column = torch.full((len(self.positions), self.end + 2), NO_COLUMN, dtype=torch.int32, device=numbers.device)
        column.scatter_(1, self.positions + 1, numbers.expand_as(self.positions))
        column[:, 0] = NO_COLUMN
        self._column = column  # by position + 1; index 0: empty slots, the last index: positions past the end

    @classmethod
    def of(cls, slots: Tensor, rows: int, like: Tensor) -> AttentionWindow:
        """An empty window of `rows` rows for slots at positions [1 or kv_heads, n]; `like` has kv_heads entries."""
        following = slots.max() + torch.arange(1, CHUNK + 1, device=slots.device)
        positions = torch.cat([each.expand(len(like), -1) for each in (slots, following)], 1)
        return cls(like.new_zeros(len(like), rows, positions.shape[1]), positions)

    def resized(self, slots: Tensor) -> AttentionWindow:
        """This window with a column for each of the slots [1 or kv_heads, n], and without many unused columns."""
        if int(slots.max()) < self.end and self.positions.shape[1] <= slots.shape[1] + 2 * CHUNK:
            return self
        resized = AttentionWindow.of(slots, self.weights.shape[1], self.weights)
        columns, known = self.columns(resized.positions)
        resized.weights = self.weights.gather(2, columns[:, None].expand_as(resized.weights)) * known[:, None]
        resized.rows = self.rows
        return resized

    def add(self, weights: Tensor, slots: Tensor) -> None:
        """Add rows [kv_heads, n, slots]; an empty slot has no weight."""
        columns, _ = self.columns(slots)
        self.weights = self.weights.clone()  # a copy of the policy may still read the former ones
        for row in weights.unbind(1):
            self.weights[:, self.rows % self.weights.shape[1]].zero_().scatter_add_(1, columns, row)
            self.rows += 1

    def mean(self, slots: Tensor) -> Tensor:
        """Mean attention per row of slots [1 or kv_heads, n], [kv_heads, n]; zero if a slot has no column."""
        columns, known = self.columns(slots)
        return (self.weights.sum(1) / min(self.rows, self.weights.shape[1])).gather(1, columns) * known

    def move(self, moving: MergedTokens) -> None:
        heads, sources, targets = moving
        self.weights = move_scores(
            self.weights, MergedTokens(heads, *(self._column[heads, end + 1].long() for end in (sources, targets)))
        )

    def for_heads(self, heads: Tensor) -> AttentionWindow:
        """The window of copies of these heads [n]."""
        alone = copy(self)
        alone.weights, alone.positions, alone._column = (
            part[heads] for part in (self.weights, self.positions, self._column)
        )
        alone._found = None
        return alone

    def columns(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of slots [1 or kv_heads, n] and whether they exist, both [kv_heads, n].

        A slot without a column gets the index of another slot's.
        """
        if self._found is None or self._found[0] is not slots:
            found = self._column.gather(1, (slots + 1).clamp_(max=self.end + 1).expand(len(self._column), -1))
            self._found = slots, found.clamp(min=0).long(), found != NO_COLUMN
        return self._found[1:]


class RecentAttention:
    """Attention of the last `count` rows of each layer, row by row, summed over the query heads of a group.

    Only tokens that have slots are tracked: after most of a long prompt is evicted, a score for every position would
    take more memory than the cache.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._layers: dict[int, AttentionWindow] = {}

    def add(self, layer: int, weights: Tensor, key_positions: Tensor) -> None:
        """Add weights [kv_heads, rows, slots] of slots at ascending key positions [1 or kv_heads, slots].

        An empty slot has no weight.
        """
        last = weights[:, -self.count:]
        window = self._layers.get(layer) or AttentionWindow.of(key_positions, self.count, last)
        self._layers[layer] = window.resized(key_positions)
        self._layers[layer].add(last, key_positions)

    def of(self, layer: int, positions: Tensor) -> Tensor:
        """Mean attention per row of slots at positions [1 or kv_heads, slots], [kv_heads, slots].

        Zero if nothing was added.
        """
        if layer not in self._layers or not positions.numel():
            return torch.zeros(positions.shape, device=positions.device)
        return self._layers[layer].mean(positions)

    def move(self, layer: int, moving: MergedTokens) -> None:
        """Like `AttentionScores.move`, for tokens that have slots."""
        if layer in self._layers:
            self._layers[layer].move(moving)

    def for_heads(self, layer: int, heads: Tensor) -> RecentAttention:
        """That of one layer, for copies of these heads [n]."""
        alone = RecentAttention(self.count)
        if layer in self._layers:
            alone._layers[layer] = self._layers[layer].for_heads(heads)
        return alone


def _grown(scores: Tensor, length: int) -> Tensor:
    """Scores [..., positions] padded to at least `length` positions, a CHUNK at a time to avoid a copy per token."""
    missing = length - scores.shape[-1]
    return pad(scores, (0, -(-missing // CHUNK) * CHUNK)) if missing > 0 else scores


def move_scores(scores: Tensor, moving: MergedTokens) -> Tensor:
    """Scores [kv_heads, ..., positions] after those of the merged positions are added to their targets."""
    heads, sources, targets = moving
    scores = scores.clone()
    by_position = scores.movedim(-1, 1)
    taken = by_position[heads, sources]
    by_position[heads, sources] = 0
    by_position.index_put_((heads, targets), taken, accumulate=True)
    return scores


def top_slots(scores: Tensor, count: int | Tensor, among: Tensor) -> Tensor:
    """Mask [heads, slots] of the `count` largest scores of each head within the mask `among`; ties go to later slots.

    `count` may differ between heads, [heads]. Scores are finite.
    """
    among = among.expand_as(scores)
    if scores.is_cpu:  # on a GPU, reading the surplus of every layer takes longer than sorting
        surplus = among.sum(-1) - count
        most = int(surplus.max())
        if most <= 0:
            return among
        if most == 1:  # every decode step in which one token is appended and one evicted
            return _without_lowest(scores, among, surplus == 1)
    ascending = scores.masked_fill(~among, REMOVED).argsort(dim=-1, stable=True)  # ties in the order of slots
    rank = torch.arange(scores.shape[1], 0, -1, device=scores.device)  # 1 for the largest
    selected = rank <= (count[:, None] if isinstance(count, Tensor) else count)
    return torch.zeros_like(among).scatter(-1, ascending, selected.expand_as(ascending)) & among


def _without_lowest(scores: Tensor, among: Tensor, evicts: Tensor) -> Tensor:
    """The mask `among` [heads, slots] without the lowest score of each head that `evicts` [heads].

    On a tie the first slot is evicted, as `argmin` guarantees.
    """
    lowest = scores.masked_fill(~among, -REMOVED).argmin(-1, keepdim=True)
    return among.scatter(-1, lowest, ~evicts[:, None]) & among
