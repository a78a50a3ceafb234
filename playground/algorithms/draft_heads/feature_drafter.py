"""Drafting with an autoregressive head over the target's hidden states: its cache follows the text, its tree grows."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.draft_heads.committed_rows import CommittedRows
from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.feature_networks import FeatureNetwork
from playground.algorithms.draft_heads.head_layers import HeadCache, NewRows
from playground.algorithms.draft_heads.scored_tree import DraftRows, ScoredTree, paths_figure
from playground.contract import knob
from playground.contract.token_tree import ROOT, TokenTree

if TYPE_CHECKING:
    from playground.contract import Lane


class FollowedText:
    """The head's rows over the text: row i read the state of token i and the embedding of token i + 1. The first `skip`
    tokens have none.
    """

    def __init__(self, network: FeatureNetwork, layers: tuple[int, ...], skip: int = 0):
        self.network, self.layers, self._rows = network, layers, CommittedRows(ahead=1, skip=skip)

    @property
    def cache(self) -> HeadCache:
        return self._rows.caches[0]

    def catch_up(self, lm: Lane) -> Tensor:
        """Read what the target has read since the last round; returns the features [1, width] of the newest token.

        Tokens that the target has not read follow with the head's own features; their rows are dropped at the next
        call.
        """
        features, first = self._rows.catch_up(lm, partial(self._read, lm)), lm.target.states.length
        for position, token in enumerate(lm.tokens[first + 1:], first):
            features = self.feed(lm, [token], features, position)
        return features

    def feed(self, lm: Lane, tokens: list[int], features: Tensor, start: int) -> Tensor:
        """Outputs [n, width] for tokens [n] that follow these features [n, width], in rows from `start` on."""
        positions = torch.arange(start, start + len(tokens), device=features.device)
        return self.network(self.network.embedded(tokens, lm.embed), features, self.place(positions))

    def place(self, positions: Tensor) -> NewRows:
        """The place of new rows at positions [n]."""
        return NewRows(self.cache, positions)

    def _read(self, lm: Lane, span: range, places: list[NewRows]) -> Tensor:
        rows = [lm.target.states.of(layer, span.start)[:len(span)] for layer in self.layers]
        following = lm.tokens[span.start + 1:span.stop + 1]
        return self.feed(lm, following, self.network.features(torch.cat(rows, -1)), span.start)


class GrowingTree(ScoredTree):
    """A draft tree that grows level by level, with the head's row after each node that is expanded."""

    def __init__(self, lm: Lane, text: FollowedText, features: Tensor, tree: TokenTree):
        super().__init__(lm, tree)
        self.text, self._rows = text, DraftRows(text.cache)
        self._after = {ROOT: features}  # [1, width], by node
        self._last = len(lm.tokens) - 2  # position of the row that read the last committed token

    def rows(self, nodes: list[int]) -> Tensor:
        if nodes != [ROOT]:
            self._read(nodes)
        features = torch.cat([self._after[node] for node in nodes])
        return self.text.network.read_out(features, self.lm.read_out).log_softmax(-1)

    def target_ids(self, tokens: Tensor) -> Tensor:
        return self.text.network.target_ids(tokens)

    def _read(self, nodes: list[int]) -> None:
        tree = self.tree
        features = torch.cat([self._after[tree.parents[node]] for node in nodes])
        place = self._rows.place(tree, nodes, self._last + 1, features.device)
        network = self.text.network
        embeddings = network.embedded([tree.tokens[node] for node in nodes], self.lm.embed)
        self._after |= zip(nodes, network(embeddings, features, place).split(1))


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
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree = TokenTree(self.name)
        if not self.nodes:
            return tree
        if self._text is None:
            self._text = FollowedText(self.network, self.state_layers(lm.depth))
        growing = GrowingTree(lm, self._text, self._text.catch_up(lm), tree)
        chosen = self.grow(growing, min(self.depth, budget))
        yield paths_figure(growing, chosen, "by the head")
        return tree.only(chosen)
