"""What the tests of Clover and Clover-2 share: the cosine of a query and a key, and the tree by brute force."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from support.draft_heads import Prefixes, chosen

Row = Callable[[tuple[int, ...]], Tensor]
"""Log-probabilities [V] after a path."""


def similar(query: Tensor, key: Tensor) -> Tensor:
    """The cosine; the width of the tests is that of one attention head."""
    return query @ key / (query.norm() * key.norm())


def level_tree(row: Row, depth: int, budget: int, width: int, top_p: float, ratio: float) -> Prefixes:
    """On each level every path gets its likely children; the most probable paths are kept while the budget lasts."""
    level, found = {(): 0.0}, set()
    for _ in range(depth):
        grown = {}
        for path, score in level.items():
            mass, best = 0.0, None
            for logp, token in chosen(row(path), width):
                share = float(torch.tensor(logp, dtype=torch.float64).exp())
                best = best or share
                if mass and (mass >= top_p or share < ratio * best):
                    break
                grown[(*path, token)] = score + logp
                mass += share
        kept = sorted(grown, key=lambda path: -grown[path])[:budget]
        level = {path: grown[path] for path in grown if path in kept}
        found |= set(level)
        budget -= len(level)
        if not budget:
            break
    return found
