"""Votes: how much attention every token has received, by its true position, and the choice of the slots with the most of it.

A token votes by attending: each kept row adds its attention weights to the tokens it looked at. Evicting renumbers nothing,
so a vote stays with its token for as long as the token has a slot.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from playground.engine.sampling import REMOVED

STRETCH = 64  # positions


class Moving(NamedTuple):
    """Tokens whose votes go over to others."""

    heads: Tensor  # [n]
    sources: Tensor  # positions, [n]
    targets: Tensor

    @classmethod
    def of(cls, sources: Tensor, targets: Tensor) -> Moving:
        """In each head from positions `sources` to `targets`, [kv_heads, n], where they differ; below 0 stands no token."""
        heads, places = ((sources != targets) & (sources >= 0)).nonzero().unbind(1)
        return cls(heads, sources[heads, places], targets[heads, places])


class Votes:
    """Attention received so far in each layer, summed over rows and over the query heads of a group."""

    def __init__(self) -> None:
        self._layers: dict[int, Tensor] = {}  # [kv_heads, positions]

    def add(self, layer: int, weights: Tensor, keys: Tensor) -> None:
        """Count the weights [kv_heads, rows, slots] of slots at positions [1 or kv_heads, slots]; below 0 a slot is empty."""
        cast = weights.sum(1).masked_fill(keys < 0, 0)
        so_far = self._reaching(layer, int(keys.max()) + 1, cast)
        self._layers[layer] = so_far.scatter_add(1, keys.clamp(min=0).expand_as(cast), cast)

    def replace(self, layer: int, weights: Tensor, keys: Tensor) -> None:
        """Let these weights, shaped as in `add`, stand in place of all votes of the layer before them."""
        self._layers.pop(layer, None)
        self.add(layer, weights, keys)

    def of(self, layer: int, positions: Tensor) -> Tensor:
        """Votes of the slots at positions [1 or kv_heads, slots], shaped [kv_heads, slots]; zero where nobody has voted."""
        if layer not in self._layers or not positions.numel():
            return torch.zeros(positions.shape, device=positions.device)
        so_far = self._reaching(layer, int(positions.max()) + 1, self._layers[layer])
        return so_far.gather(1, positions.clamp(min=0).expand(len(so_far), -1))

    def move(self, layer: int, moving: Moving) -> None:
        """Votes of tokens count for others from now on."""
        if layer in self._layers:
            self._layers[layer] = moved(self._layers[layer], moving)

    def _reaching(self, layer: int, length: int, like: Tensor) -> Tensor:
        """The votes of a layer with room for `length` positions at least."""
        return _reaching(self._layers.get(layer, like.new_zeros(len(like), 0)), length)


class Heard(NamedTuple):
    """What the latest rows of one layer attended to, slot by slot."""

    weights: Tensor  # [kv_heads, slots, rows]: those of one slot stand together, so that slots are cheap to take along
    positions: Tensor  # of the slots, rising but for empty ones, [1 or kv_heads, slots]
    rows: int  # heard of so far; the next one takes the place of the oldest


class Lately:
    """What the last `count` rows attended to in each layer, row by row, summed over the query heads of a group.

    Rows are held slot by slot: behind a long prompt of which little is left they would otherwise take more memory than the cache. A token
    that has lost its slot is forgotten.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._layers: dict[int, Heard] = {}

    def add(self, layer: int, weights: Tensor, keys: Tensor) -> None:
        """Hear of the weights [kv_heads, rows, slots] of slots at positions [1 or kv_heads, slots], which rise; below 0 a slot is empty."""
        last = weights[:, -self.count:].masked_fill(keys[:, None] < 0, 0)
        before = self._layers.get(layer)
        over = last.new_zeros(len(last), last.shape[2], self.count) if before is None else _over(before, keys)
        rows = 0 if before is None else before.rows
        for row in range(last.shape[1]):
            over[:, :, (rows + row) % self.count] = last[:, row]
        self._layers[layer] = Heard(over, keys, rows + last.shape[1])

    def of(self, layer: int, positions: Tensor) -> Tensor:
        """What the slots at positions [1 or kv_heads, slots] received of a row on average, [kv_heads, slots]; zero where nothing was heard."""
        if layer not in self._layers or not positions.numel():
            return torch.zeros(positions.shape, device=positions.device)
        heard = self._layers[layer]
        over = heard.weights if torch.equal(heard.positions, positions) else _over(heard, positions)
        return over.sum(2) / min(heard.rows, self.count)

    def move(self, layer: int, moving: Moving) -> None:
        """The same as `Votes.move`, of tokens that have slots."""
        if layer in self._layers and len(moving.heads):
            heard, (heads, *ends) = self._layers[layer], moving
            own = heard.positions.expand(len(heard.weights), -1)[heads]
            places = (_places(own, end[:, None])[:, 0] for end in ends)
            self._layers[layer] = heard._replace(weights=moved(heard.weights.mT, Moving(heads, *places)).mT)


def _over(heard: Heard, positions: Tensor) -> Tensor:
    """The weights over slots at these positions [1 or kv_heads, n], zero where there was none: [kv_heads, n, rows] in memory of their own."""
    heads, slots, rows = heard.weights.shape
    held, positions = (each.expand(heads, -1) for each in (heard.positions, positions))
    places = _places(held, positions)
    first = torch.arange(0, heads * slots, slots, device=places.device)[:, None]
    taken = heard.weights.reshape(-1, rows).index_select(0, (places + first).flatten()).view(heads, -1, rows)
    taken[held.gather(1, places) != positions] = 0
    return taken


def _places(held: Tensor, positions: Tensor) -> Tensor:
    """Where in each row of `held` [n, slots] the positions [n, m] stand; the place of another one where they do not."""
    never_falling = held.cummax(1).values  # an empty slot stands as the one before it once more
    return torch.searchsorted(never_falling, positions.contiguous()).clamp_(max=held.shape[1] - 1)


def _reaching(votes: Tensor, length: int) -> Tensor:
    """Votes [..., positions] with room for `length` positions at least; it grows by a STRETCH, so that not every token has all of them copied."""
    missing = length - votes.shape[-1]
    return pad(votes, (0, -(-missing // STRETCH) * STRETCH)) if missing > 0 else votes


def moved(votes: Tensor, moving: Moving) -> Tensor:
    """Votes [kv_heads, ..., positions] after some went over from one position to another."""
    heads, sources, targets = moving
    if not len(heads):
        return votes
    votes = votes.clone()
    by_position = votes.movedim(-1, 1)
    taken = by_position[heads, sources]
    by_position.index_put_((heads, sources), -taken, accumulate=True)
    by_position.index_put_((heads, targets), taken, accumulate=True)
    return votes


def heaviest(scores: Tensor, count: int | Tensor, among: Tensor) -> Tensor:
    """Mask of the `count` largest scores of each row that stand in the mask `among`, [rows, slots]; of equals the later ones.

    Rows may differ in their count, [rows]. Scores are finite numbers.
    """
    among = among.expand_as(scores)
    surplus = among.sum(-1) - count
    most = int(surplus.max())
    if most <= 0:
        return among
    if most == 1:  # so it is in every step in which one token comes and one goes
        return _without_the_lightest(scores, among, surplus == 1)
    rising = scores.masked_fill(~among, REMOVED).argsort(dim=-1, stable=True)  # so that equals stay in the order of their positions
    left = torch.arange(scores.shape[1], 0, -1, device=scores.device)  # of each place in that order, how many there are from it on
    chosen = left <= (count[:, None] if isinstance(count, Tensor) else count)
    return torch.zeros_like(among).scatter(-1, rising, chosen.expand_as(rising)) & among


def _without_the_lightest(scores: Tensor, among: Tensor, loses: Tensor) -> Tensor:
    """The mask `among` [rows, slots] without the smallest score of each row that `loses` [rows] one; of equals the first goes, as `argmin` promises."""
    lightest = scores.masked_fill(~among, -REMOVED).argmin(-1, keepdim=True)
    return among.scatter(-1, lightest, ~loses[:, None]) & among
