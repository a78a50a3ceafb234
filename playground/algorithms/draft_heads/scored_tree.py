"""Draft trees that grow where a head is confident, and the rows of their nodes in the cache of the head."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.draft_heads.head_layers import HeadCache, NewRows
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.host_copies import moved, read_lists
from playground.events import Figure

if TYPE_CHECKING:
    from playground.contract import Lane


class DraftRows:
    """Rows of draft tokens in a head's cache, after those of the text.

    Rows that the cache already holds after its text belong to committed tokens that the target has not read; all draft
    tokens see them.
    """

    def __init__(self, cache: HeadCache):
        self.cache, self.unread = cache, cache.rows - cache.length
        self._seen: dict[int, list[int]] = {ROOT: list(range(self.unread))}  # rows that a node sees, itself included

    def place(self, tree: TokenTree, nodes: list[int], first: int, device: torch.device) -> NewRows:
        """The place of new nodes of one level, whose rows see their ancestors'; `first` is the position of a child of
        the root.
        """
        start = self.cache.rows - self.cache.length
        for row, node in enumerate(nodes, start):
            self._seen[node] = [*self._seen[tree.parents[node]], row]
        seen = torch.zeros(len(nodes), start + len(nodes), dtype=torch.bool)
        for row, node in enumerate(nodes):
            seen[row, self._seen[node]] = True
        level = len(self._seen[nodes[0]]) - self.unread - 1
        positions = torch.full((len(nodes),), first + level, device=device)
        return NewRows(self.cache, positions, moved(seen, device))


@dataclass
class ScoredTree:
    """A draft tree with the log-probability of the path to each node."""

    lm: Lane
    tree: TokenTree
    scores: list[float] = field(default_factory=list)  # by node

    def rows(self, nodes: list[int]) -> Tensor:
        """Log-probabilities [nodes, draft vocabulary] of the token after each node."""
        raise NotImplementedError

    def target_ids(self, tokens: Tensor) -> Tensor:
        """The target's ids of tokens of the draft vocabulary."""
        return tokens

    def add(self, parents: list[int], logp: Tensor, width: int) -> list[int]:
        """Add the `width` most probable children of each parent; returns the new nodes that may have children."""
        values, ids = logp.topk(min(width, logp.shape[-1]))
        added = []
        for parent, chances, tokens in zip(parents, *read_lists(values, self.target_ids(ids))):
            added += [self.add_one(parent, token, chance) for chance, token in zip(chances, tokens)]
        return [node for node in added if not self.lm.ends(self.tree.tokens[node])]

    def add_one(self, parent: int, token: int, logp: float) -> int:
        """Add a child with its log-probability; returns the node."""
        self.scores.append(logp + (0.0 if parent == ROOT else self.scores[parent]))
        return self.tree.add(token, parent, confidence=exp(logp))


def grow_most_probable(growing: ScoredTree, depth: int, width: int, nodes: int) -> list[int]:
    """The dynamic tree of EAGLE-2: on each level expand the `width` nodes with the most probable paths, then keep the
    `nodes` most probable of all. Li et al. 2024, arXiv 2406.16858.
    """
    frontier = [ROOT]
    for _ in range(depth):
        open_nodes = growing.add(frontier, growing.rows(frontier), width)
        frontier = sorted(sorted(open_nodes, key=lambda node: -growing.scores[node])[:width])
        if not frontier:
            break
    best = sorted(range(len(growing.tree)), key=lambda node: (-growing.scores[node], node))[:nodes]
    return sorted(best)


def add_chain(lm: Lane, tree: TokenTree, logits: Tensor, target_ids: Callable[[Tensor], Tensor]) -> None:
    """Add the best token of each row of logits [n, draft vocabulary] after the one before, up to one that ends the
    text.
    """
    shares, ids = logits.softmax(-1).max(-1)
    for share, token in zip(*read_lists(shares, target_ids(ids))):
        tree.add(token, len(tree) - 1, confidence=share)
        if lm.ends(token):
            break


def chain_figure(lm: Lane, tree: TokenTree) -> Figure:
    """The probability of each token of a chain that was drafted in one forward."""
    data = {"labels": list(map(lm.piece, tree.tokens)), "values": list(tree.confidence)}
    return Figure("bars", "probability of each draft token, all of one forward", data)


def paths_figure(growing: ScoredTree, chosen: list[int], source: str) -> Figure:
    """The probability of the path to each draft token, by a head or several ("by the head")."""
    tree = growing.tree.only(chosen)
    values = [exp(growing.scores[node]) for node in chosen]
    return tree_figure(growing.lm, tree, values, f"probability of the path to each draft token, {source}")


def tree_figure(lm: Lane, tree: TokenTree, values: list[float], name: str) -> Figure:
    """A number for each draft token."""
    labels = ["text so far", *map(lm.piece, tree.tokens)]
    data = {"labels": labels, "parents": [-1, *(parent + 1 for parent in tree.parents)], "values": [1.0, *values]}
    return Figure("tree", name, data)
