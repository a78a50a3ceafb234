"""A probe that reads a syntax tree off the states of its tokens, through a subspace of few dimensions.

In the subspace, the squared distance between neighbouring tokens is trained to be in the order of the height of their
lowest common ancestor; the differences and the places themselves give the labels. Hernandez Lopez et al. 2022, arXiv
2206.11719, and the authors' code (martin-wey/ast-probe).
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from playground.algorithms.kv_cache.cache_training import Descent, DescentState, descend
from playground.algorithms.programs.syntax_tree import Constituent, TreeSequences, constituents
from playground.events import Figure, Note

DIMENSIONS = 64  # of the subspace
ORTHOGONAL = 5.0  # weight of |B^T B - I|^2
MARGIN = 1.0  # between two distances of different heights
BATCH = 32  # programs
SPREAD = 0.05  # of the weights before training
UNKNOWN = -1  # a label that is not trained on: padding, or one that no program of the training has
PLAN = Descent("training loss of the tree probe", 800, 3e-3, every=100)


class TreeExample(NamedTuple):
    """A program's tree, and the states of its tokens."""

    states: Tensor  # [n, d]
    distances: Tensor  # [n - 1]
    labels: Tensor  # [n - 1], numbers
    unary: Tensor  # [n], numbers


class TreeProbe(NamedTuple):
    """z = B^T h; a distance is |z_i - z_{i-1}|^2, scores are (z_i - z_{i-1}) V_c and z_i V_u."""

    basis: Tensor  # B, [d, m]
    labels: Tensor  # V_c, [m, labels]
    unary: Tensor  # V_u, [m, unary labels]

    @classmethod
    def random(cls, width: int, labels: int, unary: int, seed: int) -> TreeProbe:
        chance, size = torch.Generator().manual_seed(seed), min(DIMENSIONS, width)
        sizes = (width, size), (size, labels), (size, unary)
        return cls(*((2 * torch.rand(shape, generator=chance) - 1) * SPREAD for shape in sizes))

    def read(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Distances [..., n - 1], label scores [..., n - 1, labels] and unary scores [..., n, unary labels] of the
        states [..., n, d] of neighbouring tokens.
        """
        places = states @ self.basis
        steps = places[..., 1:, :] - places[..., :-1, :]
        return steps.square().sum(-1), steps @ self.labels, places @ self.unary

    def tree(self, states: Tensor, labels: Sequence[str], unary: Sequence[str]) -> TreeSequences:
        """The tree that is read off the states [n, d], with labels in words."""
        distances, scores, unary_scores = self.read(states)
        return TreeSequences(
            distances.tolist(), [labels[at] for at in scores.argmax(-1).tolist()],
            [unary[at] for at in unary_scores.argmax(-1).tolist()],
        )


def ranking_loss(found: Tensor, heights: Tensor, real: Tensor) -> Tensor:
    """Mean of relu(1 - (found_i - found_j)) over pairs of a program with height i > height j; all [programs, n - 1]."""
    pairs = (heights[:, :, None] > heights[:, None, :]) & real[:, :, None] & real[:, None, :]
    missing = (MARGIN - found[:, :, None] + found[:, None, :]).relu()
    return (missing * pairs).sum() / pairs.sum().clamp(min=1)


def tree_loss(probe: TreeProbe, examples: Sequence[TreeExample]) -> Tensor:
    """The loss of a probe on programs of any lengths."""
    states, distances, labels, unary = (
        pad_sequence([each[part] for each in examples], True, UNKNOWN if part else 0.0) for part in range(4)
    )
    found, scores, unary_scores = probe.read(states)
    basis = probe.basis
    apart = (basis.T @ basis - torch.eye(basis.shape[1])).square().sum()
    return (
        ranking_loss(found, distances, distances != UNKNOWN) + ORTHOGONAL * apart
        + cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=UNKNOWN)
        + cross_entropy(unary_scores.flatten(0, 1), unary.flatten(), ignore_index=UNKNOWN)
    )


def train(
    examples: Sequence[TreeExample], probe: TreeProbe, seed: int, state: DescentState
) -> Iterator[Figure | Note]:
    """Train a probe on programs and return it; resumable, and the same for the same seed.

    It is trained on states of mean square 1, so that all layers have distances of one size. Returns that of the states
    themselves.
    """
    weights = dict(zip(TreeProbe._fields, (tensor.clone() for tensor in probe)))
    scale = 1 / float(torch.cat([each.states for each in examples]).square().mean().sqrt())

    def loss(step: int) -> Tensor:
        chance = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randint(len(examples), (BATCH,), generator=chance).tolist()
        batch = [examples[at]._replace(states=scale * examples[at].states) for at in chosen]
        return tree_loss(TreeProbe(**weights), batch)

    yield from descend(weights, loss, PLAN, state)
    basis, labels, unary = (tensor.detach() for tensor in weights.values())
    return TreeProbe(scale * basis, labels, unary)


class TreeScore(NamedTuple):
    """How much of a true tree a tree has, by label and tokens of each constituent."""

    precision: float
    recall: float
    f1: float

    @classmethod
    def of(cls, found: Sequence[Constituent], true: Sequence[Constituent]) -> TreeScore:
        both = (Counter(found) & Counter(true)).total()
        return cls(both / max(len(found), 1), both / max(len(true), 1), 2 * both / max(len(found) + len(true), 1))


def mean_f1(found: Sequence[TreeSequences], true: Sequence[Sequence[Constituent]]) -> float:
    """The mean of F1 over programs."""
    scores = [TreeScore.of(constituents(tree), real).f1 for tree, real in zip(found, true, strict=True)]
    return sum(scores) / max(len(scores), 1)
