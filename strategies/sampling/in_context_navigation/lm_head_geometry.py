"""Geometry of the lm_head's weight vectors: clusters and a plane to draw them in."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from playground.engine.sampling import ranked

LEARNED = 4096  # maximum vectors used by k-means, evenly spaced over the vocabulary
ROUNDS = 20
Place = tuple[float, float]


def clusters(weights: Tensor, count: int) -> Tensor:
    """Unit centres [k, width] of at most `count` clusters of lm_head weights [V, width], by spherical k-means.

    Starts from evenly spaced vectors, so it is deterministic; an empty cluster keeps its centre.
    """
    every = -(-len(weights) // LEARNED)
    weights = _unit(weights[::every].float())
    centres, nearest = weights[:: -(-len(weights) // count)].clone(), None
    for _ in range(ROUNDS):
        before, nearest = nearest, cluster_of(weights, centres)
        if before is not None and torch.equal(before, nearest):
            break
        sums = torch.zeros_like(centres).index_add_(0, nearest, weights)
        nonempty = nearest.bincount(minlength=len(centres)) > 0
        centres[nonempty] = _unit(sums[nonempty])
    return centres


def cluster_of(weights: Tensor, centres: Tensor) -> Tensor:
    """The cluster of each vector [n, width]: the index of the centre with the largest cosine; ties go to the first."""
    return (_unit(weights.float()) @ centres.T).argmax(-1)


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


class Plane(NamedTuple):
    """The plane of the first two principal components of some vectors."""

    mean: Tensor  # [width]
    axes: Tensor  # [width, 2]
    reach: float  # largest distance of a projected vector from the mean

    @classmethod
    def through(cls, weights: Tensor) -> Plane:
        """The plane of at least two vectors [n, width]; the largest component of each axis is positive."""
        weights = weights.float()
        centred = weights - weights.mean(0)
        axes = torch.linalg.svd(centred, full_matrices=False).Vh[:2].T
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
        return cls(weights.mean(0), axes, float(centred.matmul(axes).norm(dim=-1).max()) or 1.0)

    def places(self, weights: Tensor) -> list[Place]:
        """Projections of vectors [n, width]."""
        return [_rounded(place) for place in ((weights.float() - self.mean) @ self.axes).tolist()]

    def arrow(self, query: Tensor) -> Place:
        """Projection of the direction of a query [width], scaled to `reach`; logits increase along it."""
        return _rounded((_unit(query.float()) @ self.axes * self.reach).tolist())


def _rounded(place: list[float]) -> Place:
    return round(place[0], 4), round(place[1], 4)


@dataclass(frozen=True)
class Atlas:
    """lm_head weights, their clusters, and the plane of the tokens that one query ranks best."""

    weights: Tensor  # of the lm_head, [V, width]
    centres: Tensor  # [k, width]
    plane: Plane
    tokens: list[int]  # best first
    cluster: list[int]  # of each of them

    @classmethod
    def of(cls, weights: Tensor, row: Tensor, most: int, count: int) -> Atlas:
        """For the `most` best tokens of logits [V], with `count` clusters of all weights."""
        best, centres = ranked(row, most).indices, clusters(weights, count)
        cluster = cluster_of(weights[best], centres).tolist()
        return cls(weights, centres, Plane.through(weights[best]), best.tolist(), cluster)

    def clusters_of(self, tokens: list[int]) -> list[int]:
        return cluster_of(self.weights[tokens], self.centres).tolist()

    def main(self, count: int) -> set[int]:
        """Clusters of the `count` best tokens."""
        return set(self.cluster[:count])

    def largest(self, count: int) -> dict[int, list[int]]:
        """The `count` clusters with most of these tokens, with their tokens."""
        return {
            number: [token for token, own in zip(self.tokens, self.cluster) if own == number]
            for number, _ in Counter(self.cluster).most_common(count)
        }
