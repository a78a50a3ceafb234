"""Votes: how much attention every token has received, by its true position, and the choice of the slots with the most
of it.

A token votes by attending: each kept row adds its attention weights to the tokens it looked at. Evicting renumbers
nothing, so a vote stays with its token for as long as the token has a slot.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from playground.engine.kv_buffer import MergedTokens
from playground.engine.sampling import REMOVED

STRETCH = 64  # positions
NOWHERE = -1


class Votes:
    """Attention received so far in each layer, summed over rows and over the query heads of a group."""

    def __init__(self) -> None:
        self._layers: dict[int, Tensor] = {}  # [kv_heads, positions]
        self._told: dict[int, Tensor] = {}  # positions of the slots that votes were cast for last

    def add(self, layer: int, weights: Tensor, keys: Tensor) -> None:
        """Count the weights [kv_heads, rows, slots] of slots at positions [1 or kv_heads, slots]; below 0 a slot is
        empty and has no weight.
        """
        cast = weights.sum(1)
        so_far = self._reaching(layer, int(keys.max()) + 1, cast)
        self._layers[layer], self._told[layer] = so_far.scatter_add(1, keys.clamp(min=0).expand_as(cast), cast), keys

    def replace(self, layer: int, weights: Tensor, keys: Tensor) -> None:
        """Let these weights, shaped as in `add`, stand in place of all votes of the layer before them."""
        self._layers.pop(layer, None)
        self.add(layer, weights, keys)

    def of(self, layer: int, positions: Tensor) -> Tensor:
        """Votes of the slots at positions [1 or kv_heads, slots], shaped [kv_heads, slots]; zero where nobody has
        voted.
        """
        if layer not in self._layers or not positions.numel():
            return torch.zeros(positions.shape, device=positions.device)
        so_far = self._layers[layer]
        if self._told[layer] is not positions:
            so_far = self._reaching(layer, int(positions.max()) + 1, so_far)
        return so_far.gather(1, positions.clamp(min=0).expand(len(so_far), -1))

    def move(self, layer: int, moving: MergedTokens) -> None:
        """Votes of tokens count for others from now on."""
        if layer in self._layers:
            self._layers[layer] = moved(self._layers[layer], moving)

    def _reaching(self, layer: int, length: int, like: Tensor) -> Tensor:
        """The votes of a layer with room for `length` positions at least."""
        return _reaching(self._layers.get(layer, like.new_zeros(len(like), 0)), length)


@dataclass
class Heard:
    """What the latest rows of one layer attended to, column by column: one for each slot when the columns were made,
    and for the STRETCH of positions that follow. So tokens come and go for a while without anything being copied."""

    weights: Tensor  # [kv_heads, rows, columns]; a row takes the place of the oldest
    positions: Tensor  # of the columns, [kv_heads, columns]; below 0 one is empty
    rows: int = 0  # heard of so far
    _found: tuple[Tensor, Tensor, Tensor] | None = None  # slots that were looked for last, and what was found of them

    def __post_init__(self) -> None:
        self.end = int(self.positions.max()) + 1
        numbers = torch.arange(self.positions.shape[1], device=self.positions.device, dtype=torch.int32)
        column = torch.full((len(self.positions), self.end + 2), NOWHERE, dtype=torch.int32, device=numbers.device)
        column.scatter_(1, self.positions + 1, numbers.expand_as(self.positions))
        column[:, 0] = NOWHERE
        self._column = column  # of each position, from that of an empty slot to one that is too late

    @classmethod
    def of(cls, slots: Tensor, rows: int, like: Tensor) -> Heard:
        """Nothing yet of slots at positions [1 or kv_heads, n]; `like` has as many heads."""
        following = slots.max() + torch.arange(1, STRETCH + 1, device=slots.device)
        positions = torch.cat([each.expand(len(like), -1) for each in (slots, following)], 1)
        return cls(like.new_zeros(len(like), rows, positions.shape[1]), positions)

    def reaching(self, slots: Tensor) -> Heard:
        """The same with a column for each of the slots, [1 or kv_heads, n], and for not many more."""
        if int(slots.max()) < self.end and self.positions.shape[1] <= slots.shape[1] + 2 * STRETCH:
            return self
        wider = Heard.of(slots, self.weights.shape[1], self.weights)
        columns, known = self.columns(wider.positions)
        wider.weights, wider.rows = (
            self.weights.gather(2, columns[:, None].expand_as(wider.weights)) * known[:, None],
            self.rows,
        )
        return wider

    def add(self, weights: Tensor, slots: Tensor) -> None:
        """Hear of rows [kv_heads, n, slots]; an empty slot has no weight."""
        columns, _ = self.columns(slots)
        for row in weights.unbind(1):
            self.weights[:, self.rows % self.weights.shape[1]].zero_().scatter_add_(1, columns, row)
            self.rows += 1

    def mean(self, slots: Tensor) -> Tensor:
        """What slots [1 or kv_heads, n] received of a row, [kv_heads, n]; zero where there is no column."""
        columns, known = self.columns(slots)
        return (self.weights.sum(1) / min(self.rows, self.weights.shape[1])).gather(1, columns) * known

    def move(self, moving: MergedTokens) -> None:
        heads, sources, targets = moving
        self.weights = moved(
            self.weights, MergedTokens(heads, *(self._column[heads, end + 1].long() for end in (sources, targets)))
        )

    def columns(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of slots [1 or kv_heads, n], and where there are such: elsewhere it is that of another one. Both
        [kv_heads, n].
        """
        if self._found is None or self._found[0] is not slots:
            found = self._column.gather(1, (slots + 1).clamp_(max=self.end + 1).expand(len(self._column), -1))
            self._found = slots, found.clamp(min=0).long(), found != NOWHERE
        return self._found[1:]


class Lately:
    """What the last `count` rows attended to in each layer, row by row, summed over the query heads of a group.

    Only tokens that have slots are kept track of: behind a long prompt of which little is left, all others would take
    more memory than the cache.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._layers: dict[int, Heard] = {}

    def add(self, layer: int, weights: Tensor, keys: Tensor) -> None:
        """Hear of the weights [kv_heads, rows, slots] of slots at positions [1 or kv_heads, slots], which rise; an
        empty slot has no weight.
        """
        last = weights[:, -self.count:]
        heard = self._layers.get(layer) or Heard.of(keys, self.count, last)
        self._layers[layer] = heard.reaching(keys)
        self._layers[layer].add(last, keys)

    def of(self, layer: int, positions: Tensor) -> Tensor:
        """What the slots at positions [1 or kv_heads, slots] received of a row on average, [kv_heads, slots]; zero
        where nothing was heard.
        """
        if layer not in self._layers or not positions.numel():
            return torch.zeros(positions.shape, device=positions.device)
        return self._layers[layer].mean(positions)

    def move(self, layer: int, moving: MergedTokens) -> None:
        """The same as `Votes.move`, of tokens that have slots."""
        if layer in self._layers:
            self._layers[layer].move(moving)


def _reaching(votes: Tensor, length: int) -> Tensor:
    """Votes [..., positions] with room for `length` positions at least; it grows by a STRETCH, so that not every token
    has all of them copied.
    """
    missing = length - votes.shape[-1]
    return pad(votes, (0, -(-missing // STRETCH) * STRETCH)) if missing > 0 else votes


def moved(votes: Tensor, moving: MergedTokens) -> Tensor:
    """Votes [kv_heads, ..., positions] after some went over from one position to another."""
    heads, sources, targets = moving
    votes = votes.clone()
    by_position = votes.movedim(-1, 1)
    taken = by_position[heads, sources]
    by_position[heads, sources] = 0
    by_position.index_put_((heads, targets), taken, accumulate=True)
    return votes


def heaviest(scores: Tensor, count: int | Tensor, among: Tensor) -> Tensor:
    """Mask of the `count` largest scores of each row that stand in the mask `among`, [rows, slots]; of equals the later
    ones.

    Rows may differ in their count, [rows]. Scores are finite numbers.
    """
    among = among.expand_as(scores)
    surplus = among.sum(-1) - count
    most = int(surplus.max())
    if most <= 0:
        return among
    if most == 1:  # so it is in every step in which one token comes and one goes
        return _without_the_lightest(scores, among, surplus == 1)
    # so that equals stay in the order of their positions
    rising = scores.masked_fill(~among, REMOVED).argsort(dim=-1, stable=True)
    # of each place in that order, how many there are from it on
    left = torch.arange(scores.shape[1], 0, -1, device=scores.device)
    chosen = left <= (count[:, None] if isinstance(count, Tensor) else count)
    return torch.zeros_like(among).scatter(-1, rising, chosen.expand_as(rising)) & among


def _without_the_lightest(scores: Tensor, among: Tensor, loses: Tensor) -> Tensor:
    """The mask `among` [rows, slots] without the smallest score of each row that `loses` [rows] one; of equals the
    first goes, as `argmin` promises.
    """
    lightest = scores.masked_fill(~among, -REMOVED).argmin(-1, keepdim=True)
    return among.scatter(-1, lightest, ~loses[:, None]) & among
