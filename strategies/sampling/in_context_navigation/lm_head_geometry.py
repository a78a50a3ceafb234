"""Keys: the rows of a model's head, whose products with its state are the scores of the tokens; how they lie to each
other.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LEARNED = 4096  # keys that clusters are made of, at most, evenly spaced over the vocabulary
ROUNDS = 20
Place = tuple[float, float]


def clusters(keys: Tensor, count: int) -> Tensor:
    """Centres [k, width] of length 1 of at most `count` clusters of keys [V, width], by k-means with cosines.

    It begins with keys that are evenly spaced, so the same keys give the same clusters; a centre that nobody is near
    stays where it is.
    """
    every = -(-len(keys) // LEARNED)
    keys = _unit(keys[::every].float())
    centres, nearest = keys[:: -(-len(keys) // count)].clone(), None
    for _ in range(ROUNDS):
        before, nearest = nearest, cluster_of(keys, centres)
        if before is not None and torch.equal(before, nearest):
            break
        sums = torch.zeros_like(centres).index_add_(0, nearest, keys)
        taken = nearest.bincount(minlength=len(centres)) > 0
        centres[taken] = _unit(sums[taken])
    return centres


def cluster_of(keys: Tensor, centres: Tensor) -> Tensor:
    """The cluster of each key [n, width]: the number of the centre with the largest cosine, of equals the first."""
    return (_unit(keys.float()) @ centres.T).argmax(-1)


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


class Plane(NamedTuple):
    """The plane in which some keys lie furthest apart, by their two principal components."""

    mean: Tensor  # [width]
    axes: Tensor  # [width, 2]
    reach: float  # how far the outermost of the keys is from their mean

    @classmethod
    def through(cls, keys: Tensor) -> Plane:
        """Of keys [n, width], two at least. An axis points to where its largest component is positive."""
        keys = keys.float()
        axes = torch.linalg.svd(keys - keys.mean(0), full_matrices=False).Vh[:2].T
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
        return cls(keys.mean(0), axes, float((keys - keys.mean(0)).matmul(axes).norm(dim=-1).max()) or 1.0)

    def places(self, keys: Tensor) -> list[Place]:
        """Of keys [n, width]."""
        return [_rounded(place) for place in ((keys.float() - self.mean) @ self.axes).tolist()]

    def arrow(self, query: Tensor) -> Place:
        """Where a query [width] points, from the middle: keys that way have larger products. It reaches as far as the
        keys if it lies in the plane.
        """
        return _rounded((_unit(query.float()) @ self.axes * self.reach).tolist())


def _rounded(place: list[float]) -> Place:
    return round(place[0], 4), round(place[1], 4)


@dataclass(frozen=True)
class Atlas:
    """The keys of the tokens that one query ranks best."""

    keys: Tensor  # [V, width] of all tokens
    centres: Tensor  # [k, width]
    plane: Plane
    tokens: list[int]  # the best first
    cluster: list[int]  # of each of them

    @classmethod
    def of(cls, keys: Tensor, row: Tensor, most: int, count: int) -> Atlas:
        """Of the `most` best tokens of a row [V], with `count` clusters of all keys."""
        best, centres = row.sort(descending=True, stable=True).indices[:most], clusters(keys, count)
        return cls(keys, centres, Plane.through(keys[best]), best.tolist(), cluster_of(keys[best], centres).tolist())

    def clusters_of(self, tokens: list[int]) -> list[int]:
        return cluster_of(self.keys[tokens], self.centres).tolist()

    def main(self, count: int) -> set[int]:
        """Clusters of the `count` best tokens."""
        return set(self.cluster[:count])

    def largest(self, count: int) -> dict[int, list[int]]:
        """The clusters most of these tokens are in, with those tokens."""
        return {
            number: [token for token, own in zip(self.tokens, self.cluster) if own == number]
            for number, _ in Counter(self.cluster).most_common(count)
        }
