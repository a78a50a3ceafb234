"""Drafting with an autoregressive head over the target's hidden states: its cache follows the text, its tree grows."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.feature_networks import FeatureNetwork
from playground.algorithms.draft_heads.head_layers import HeadCache, NewRows
from playground.contract import knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.events import Figure

if TYPE_CHECKING:
    from playground.decoding.lane import Lane


CHUNK = 512  # tokens of the text that a head reads at once


class FollowedText:
    """The head's cache over the text: row i read the state of token i and the embedding of token i + 1.

    Rows of tokens that are no longer in the text are dropped before new ones are read.
    """

    def __init__(self, network: FeatureNetwork, layers: tuple[int, ...]):
        self.network, self.layers, self.cache = network, layers, HeadCache()
        self._first, self._read = 0, []  # position of the first row, and the second token of each row
        self._unread: list[Tensor] = []

    def catch_up(self, lm: Lane) -> Tensor:
        """Read what the target has read since the last round; returns the features [1, width] of the newest token.

        Tokens that the target has not read follow with the head's own features; their rows are dropped at the next
        call.
        """
        states, tokens = lm.target.states, lm.tokens
        self._drop_stale(states.start, tokens)
        start = min(states.start + len(self._read), states.length - 1)  # the last row is read again if nothing is new
        self.cache.crop(start - states.start)
        del self._read[start - states.start:]
        rows = torch.cat([states.of(layer, start) for layer in self.layers], -1)
        for first in range(start, states.length, CHUNK):
            follow = tokens[first + 1:states.length + 1][:CHUNK]
            features = self._feed(lm, follow, self.network.features(rows[first - start:][:CHUNK]), first)[-1:]
            self.cache.commit()
            self._read += follow
        for position, token in enumerate(tokens[states.length + 1:], states.length):
            features = self._feed(lm, [token], features, position)
        return features

    def _feed(self, lm: Lane, tokens: list[int], features: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + len(tokens), device=features.device)
        return self.network(lm.embed(tokens), features, NewRows(self.cache, positions))

    def _drop_stale(self, first: int, tokens: list[int]) -> None:
        """Drop rows from the first token on that is no longer in the text."""
        if first != self._first:
            self._first, self._read = first, []
        following = tokens[first + 1:first + 1 + len(self._read)]
        if following != self._read:
            same = next((i for i, pair in enumerate(zip(following, self._read)) if pair[0] != pair[1]), len(following))
            del self._read[same:]
        self.cache.crop(len(self._read))


@dataclass
class GrowingTree:
    """A draft tree that grows level by level, with the head's row after each node that is expanded."""

    lm: Lane
    text: FollowedText
    features: Tensor  # [1, width], after the text
    tree: TokenTree
    scores: list[float] = field(default_factory=list)  # by node, the log-probability of its path

    def __post_init__(self) -> None:
        self._after = {ROOT: self.features}
        self._before = self.text.cache.rows - self.text.cache.length  # rows of committed tokens not read by the target
        self._columns: dict[int, list[int]] = {ROOT: list(range(self._before))}  # cache rows a node sees, by node
        self._last = len(self.lm.tokens) - 2  # position of the row that read the last committed token

    def rows(self, nodes: list[int]) -> Tensor:
        """Log-probabilities [nodes, draft vocabulary] of the token after each node."""
        if nodes != [ROOT]:
            self._read(nodes)
        features = torch.cat([self._after[node] for node in nodes])
        return self.text.network.read_out(features, self.lm.read_out).log_softmax(-1)

    def _read(self, nodes: list[int]) -> None:
        cache, tree = self.text.cache, self.tree
        first = cache.rows - cache.length
        for column, node in enumerate(nodes, first):
            self._columns[node] = [*self._columns[tree.parents[node]], column]
        seen = torch.zeros(len(nodes), first + len(nodes), dtype=torch.bool)
        for row, node in enumerate(nodes):
            seen[row, self._columns[node]] = True
        features = torch.cat([self._after[tree.parents[node]] for node in nodes])
        depth = len(self._columns[nodes[0]]) - self._before
        positions = torch.full((len(nodes),), self._last + depth, device=features.device)
        place = NewRows(cache, positions, seen.to(features.device))
        embeddings = self.lm.embed([tree.tokens[node] for node in nodes])
        self._after |= zip(nodes, self.text.network(embeddings, features, place).split(1))

    def add(self, parents: list[int], logp: Tensor, width: int) -> list[int]:
        """Add the `width` most probable children of each parent; returns the new nodes that may have children."""
        values, ids = logp.topk(min(width, logp.shape[-1]))
        added = []
        for parent, chances, tokens in zip(parents, values.tolist(), self.text.network.target_ids(ids).tolist()):
            added += [self.add_one(parent, token, chance) for chance, token in zip(chances, tokens)]
        return [node for node in added if not self.lm.ends(self.tree.tokens[node])]

    def add_one(self, parent: int, token: int, logp: float) -> int:
        """Add a child with its log-probability; returns the node."""
        self.scores.append(logp + (0.0 if parent == ROOT else self.scores[parent]))
        return self.tree.add(token, parent, confidence=exp(logp))


class FeatureDrafter(DraftHead):
    """An autoregressive head over hidden states; subclasses say how its tree grows."""

    nodes: int = knob(24, 0, 128, step=1, help="draft tokens in the tree; 0 is plain decoding")
    depth: int = knob(5, 1, 10, step=1, help="levels of the draft tree")

    def __post_init__(self):
        super().__post_init__()
        self._text: FollowedText | None = None

    def grow(self, growing: GrowingTree, depth: int) -> list[int]:
        """Grow a tree at most `depth` deep; returns the nodes to verify, ascending, the parent of each among them."""
        raise NotImplementedError

    @torch.inference_mode()
    def drafted(self, lm, budget) -> Iterator:
        tree = TokenTree(self.name)
        if not self.nodes:
            return tree
        if self._text is None:
            self._text = FollowedText(self.network, self.state_layers(lm.depth))
        growing = GrowingTree(lm, self._text, self._text.catch_up(lm), tree)
        chosen = self.grow(growing, min(self.depth, budget))
        yield self._figure(growing, chosen)
        return tree.only(chosen)

    def _figure(self, growing: GrowingTree, chosen: list[int]) -> Figure:
        """The head's estimate that a path is accepted, for each draft token."""
        tree = growing.tree.only(chosen)
        labels = ["text so far", *map(growing.lm.piece, tree.tokens)]
        values = [1.0, *(exp(growing.scores[node]) for node in chosen)]
        data = {"labels": labels, "parents": [-1, *(parent + 1 for parent in tree.parents)], "values": values}
        return Figure("tree", "probability of the path to each draft token, by the head", data)


def grow_most_probable(growing: GrowingTree, depth: int, width: int, nodes: int) -> list[int]:
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
