"""Drafting with a network that fills a block of masks: its caches follow the target's states of the text."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from playground.algorithms.draft_heads.blocks.block_network import DFlashNetwork, Reach
from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.head_layers import HeadCache, HeadShape
from playground.contract import Lane, knob
from playground.contract.token_tree import TokenTree

BLOCK = 8  # tokens of a block, where the drafter does not say
CHUNK = 512  # tokens of the text that the drafter reads at once


class BlockDrafter(DraftHead):
    """A drafter whose network fills a block in one forward; subclasses say what they draft of it."""

    depth: int = knob(15, 0, 31, step=1, help="draft tokens, at most the masks of a block; 0 is plain decoding")

    def __post_init__(self):
        super().__post_init__()
        self._layers: tuple[int, ...] = ()  # those that the drafter names
        self._block, self._mask, self._anchor = BLOCK, 0, False  # whether the anchor's row predicts, too
        self._caches: list[HeadCache] | None = None
        self._read: list[int] = []  # the tokens whose states were read
        self._first = 0  # position of the first of them

    def begin_fitted(self, weights):
        self._layers = tuple(weights["layers"].tolist())
        self._block, self._mask = int(weights["block_size"]), int(weights["mask_token_id"])
        self._anchor = bool(weights.get("sample_from_anchor", False))

    def state_layers(self, depth):
        return self._layers or tuple(sorted({min(2, depth), (depth + 1) // 2, depth}))

    @classmethod
    def untrained(cls, width, depth):
        layers = cls.state_layers(cls(), depth)
        return DFlashNetwork(HeadShape.like(width), len(layers) * width, [Reach()]).state_dict()

    @classmethod
    def build(cls, weights):
        return DFlashNetwork.of(weights)

    def draft(self, lm: Lane, hidden: Tensor, rows: range, tree: TokenTree) -> Iterator:
        """Add draft tokens for outputs [block, width] of the network, of which these rows guess one token each.

        A slice of the outputs stays on their device, where an index by `rows` would wait for the host.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree, first = TokenTree(self.name), lm.target.behind() - self._anchor
        count = min(self._block - first, self.depth, budget)
        if count > 0:
            self._catch_up(lm)
            yield from self.draft(lm, self._filled(lm), range(first, first + count), tree)
        return tree

    def before(self, block: list[int], row: int) -> int:
        """The token before the one that a row guesses, in a block of known and drafted tokens; that of the block's
        first row is the first token itself.
        """
        return block[row if self._anchor else max(0, row - 1)]

    def _filled(self, lm: Lane) -> Tensor:
        """The network's outputs [block, width] for a block that begins with the tokens that the target has not read."""
        unread = lm.target.behind()
        rows = lm.embed([*lm.tokens[-unread:], *[self._mask] * (self._block - unread)])
        start = len(lm.tokens) - unread
        positions = torch.arange(start, start + len(rows), device=rows.device)
        return self.network(rows, positions, self._caches, self._first)

    def _catch_up(self, lm: Lane) -> None:
        """Read the states of tokens that the target has read, and forget what is no longer in the text."""
        states = lm.target.states
        if self._caches is None or states.start != self._first:
            self._caches, self._read, self._first = self.network.new_caches(), [], states.start
        known = lm.tokens[states.start:states.length]
        pairs = zip(known, self._read)
        same = next((i for i, (own, read) in enumerate(pairs) if own != read), min(len(known), len(self._read)))
        for cache in self._caches:
            cache.crop(same)
        layers = self.state_layers(lm.depth)
        for first in range(self._first + same, states.length, CHUNK):
            rows = torch.cat([states.of(layer, first)[:CHUNK] for layer in layers], -1)
            self.network.read(rows, torch.arange(first, first + len(rows), device=rows.device), self._caches)
        self._read = known
