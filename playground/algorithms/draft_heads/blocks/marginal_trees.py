"""Draft trees of a block drafter, whose forward gives one distribution for each depth, whatever the tokens before it.

A path is taken to be as probable as the product of these marginals. Ringel and Romano 2026, arXiv 2604.12989; Hu et al.
2026, arXiv 2606.18394.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from torch import Tensor

from playground.algorithms.draft_heads.scored_tree import ScoredTree
from playground.contract.token_tree import ROOT
from playground.engine.host_copies import read_lists

Waiting = list[tuple[float, tuple[int, ...], int]]
"""A heap of what may be added: minus the score of a path, its ranks, and the node that it continues or ends in."""


@dataclass
class Marginals:
    """The most probable tokens of each depth, the best first, and the log-probability of each."""

    logp: list[list[float]]
    tokens: list[list[int]]

    @classmethod
    def of(cls, logits: Tensor, ranks: int, target_ids: Callable[[Tensor], Tensor]) -> Marginals:
        """The first `ranks` of rows of logits [depths, draft vocabulary]."""
        values, ids = logits.log_softmax(-1).topk(min(ranks, logits.shape[-1]))
        return cls(*read_lists(values, target_ids(ids)))

    def add(self, growing: ScoredTree, parent: int, ranks: tuple[int, ...]) -> int:
        """Add the token of the last of these ranks after a node; returns the new node."""
        depth, rank = len(ranks) - 1, ranks[-1]
        return growing.add_one(parent, self.tokens[depth][rank], self.logp[depth][rank])

    def may_continue(self, growing: ScoredTree, ranks: tuple[int, ...], node: int) -> bool:
        """Whether a path may have children: it is neither as deep as the block nor ends the text."""
        return len(ranks) < len(self.logp) and not (node != ROOT and growing.lm.ends(growing.tree.tokens[node]))


def grow_best_prefixes(growing: ScoredTree, marginals: Marginals, nodes: int) -> None:
    """Add the `nodes` most probable paths of all, one by one: no tree of that size is accepted to a greater expected
    depth if the marginals are right (DDTree).
    """
    waiting: Waiting = []

    def offer(parent: int, ranks: tuple[int, ...]) -> None:
        depth, rank = len(ranks) - 1, ranks[-1]
        if rank < len(marginals.logp[depth]):
            before = 0.0 if parent == ROOT else growing.scores[parent]
            heappush(waiting, (-before - marginals.logp[depth][rank], ranks, parent))

    offer(ROOT, (0,))
    while waiting and len(growing.tree) < nodes:
        _, ranks, parent = heappop(waiting)
        node = marginals.add(growing, parent, ranks)
        offer(parent, (*ranks[:-1], ranks[-1] + 1))
        if marginals.may_continue(growing, ranks, node):
            offer(node, (*ranks, 0))


def grow_fans(growing: ScoredTree, marginals: Marginals, nodes: int, width: int) -> None:
    """Give the most probable path its `width` best children, again and again, until there are `nodes` (JetSpec)."""
    waiting: Waiting = [(0.0, (), ROOT)]
    while waiting:
        _, ranks, parent = heappop(waiting)
        if not marginals.may_continue(growing, ranks, parent):
            continue
        for rank in range(min(width, len(marginals.logp[len(ranks)]))):
            if len(growing.tree) >= nodes:
                return
            node = marginals.add(growing, parent, (*ranks, rank))
            heappush(waiting, (-growing.scores[node], (*ranks, rank), node))
