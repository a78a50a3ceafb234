"""A draft tree from what a model predicted after each token before, regardless of context: no trained drafter.

For every token that the model read, its most probable next tokens are kept with their probabilities. The tree takes the
paths with the largest products, as EAGLE-2 ranks the nodes of its trees (Li et al. 2024, arXiv 2406.16858).
"""
from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from torch import Tensor

from playground.contract.token_tree import TokenTree
from playground.engine.sampling import largest


class TreeShape(NamedTuple):
    """Limits of a draft tree."""

    nodes: int
    levels: int
    width: int  # children of a node


class LikelySuccessors:
    """The most probable next tokens after each token read, with their probabilities."""

    def __init__(self) -> None:
        self.known: dict[int, list[tuple[int, float]]] = {}

    def learn(self, tokens: list[int], logits: Tensor, width: int) -> None:
        """Keep the `width` best of logits [n, V] after n tokens; of a repeated token the last row counts."""
        shares, best = largest(logits.softmax(-1), min(width, logits.shape[1]))
        for token, row, values in zip(tokens, best.tolist(), shares.tolist()):
            self.known[token] = list(zip(row, values))

    def grow(self, tree: TokenTree, node: int, token: int, shape: TreeShape, ends: Callable[[int], bool]) -> None:
        """Add the most probable continuations of `token`, which is at `node`, below it; ended ones have no children."""
        waiting: list[tuple[float, int, int, int, int]] = []  # -probability, age, parent, token, level
        age = self._push(waiting, (1.0, node, token, 0), 0, shape)
        for _ in range(shape.nodes):
            if not waiting:
                return
            chance, _, parent, child, level = heappop(waiting)
            added = tree.add(child, parent, confidence=-chance)
            if level < shape.levels and not ends(child):
                age = self._push(waiting, (-chance, added, child, level), age, shape)

    def _push(self, waiting: list, above: tuple[float, int, int, int], age: int, shape: TreeShape) -> int:
        """Queue the successors of a node, given by probability, number, token and level; returns the next age."""
        chance, node, token, level = above
        for child, share in self.known.get(token, ())[:shape.width] if level < shape.levels else ():
            heappush(waiting, (-chance * share, age, node, child, level + 1))
            age += 1
        return age
