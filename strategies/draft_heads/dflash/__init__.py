"""DFlash: a small diffusion model over the target's hidden states fills a whole block of draft tokens at once."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from playground.algorithms.draft_heads.dflash_network import DFlashNetwork
from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.head_layers import HeadShape
from playground.algorithms.draft_heads.head_training import HeadTexts, HeadTraining, measured, trained
from playground.contract import Lane, knob
from playground.contract.token_tree import TokenTree
from playground.engine.host_copies import read_lists
from playground.events import Figure
from strategies.draft_heads.dflash.masked_texts import guesses, losses

BLOCK = 8  # tokens of a block, where the drafter does not say
LAYERS, MASK = 2, 0  # of a drafter that is trained here: its layers, and the token in place of a mask
CHUNK = 512  # tokens of the text that the drafter reads at once


class DFlash(DraftHead):
    """A few layers fill a block of masks after the newest token in one forward, so that drafting deep costs no more.

    The rows of the block see each other in both directions, and the text through the target's hidden states of some
    layers, which each of the drafter's layers turns into keys and values of its own. The best token at each mask makes
    a chain. Published drafters are read from a folder: `--draft FOLDER`, or `fit dflash --from FOLDER`. The one for the
    bundled target has two layers instead of five. depth = 0 is plain decoding. Chen et al. 2026, arXiv 2602.06036.
    """

    name, title, paper, sheet = "dflash", "DFlash", "2602.06036", "draft-heads/public-formats"
    guarantee = ("collapses",)

    depth: int = knob(15, 0, 31, step=1, help="draft tokens, at most the masks of a block; 0 is plain decoding")

    def __post_init__(self):
        super().__post_init__()
        self._layers: tuple[int, ...] = ()  # those that the drafter names
        self._block, self._mask = BLOCK, 0
        self._caches, self._read, self._first = None, [], 0  # the tokens whose states were read, and the first position

    def begin_fitted(self, weights):
        self._layers = tuple(weights["layers"].tolist())
        self._block, self._mask = int(weights["block_size"]), int(weights["mask_token_id"])

    def state_layers(self, depth):
        return self._layers or tuple(sorted({min(2, depth), (depth + 1) // 2, depth}))

    @classmethod
    def untrained(cls, width, depth):
        layers = cls.state_layers(cls(), depth)
        return DFlashNetwork(HeadShape.like(width), len(layers) * width, [0]).state_dict()

    @classmethod
    def build(cls, weights):
        return DFlashNetwork.of(weights)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train blocks of masks after random anchors on the tokens that the target wrote; returns the weights."""
        layers = cls.state_layers(cls(), texts.depth)
        torch.manual_seed(texts.seed)
        network = DFlashNetwork(HeadShape.like(texts.width), len(layers) * texts.width, [0] * LAYERS)
        inputs = next(texts.batches(0)).states[texts.depth]
        network.norm.weight.data = inputs.square().mean((0, 1)).sqrt()  # the scale that the lm_head expects
        found = partial(guesses, network, texts, layers=layers, block=BLOCK, mask=MASK)
        training = HeadTraining(epochs=6, rate=1e-3)
        yield from trained(network, texts, lambda batch: losses(found(batch), texts.lm_head), training)
        yield measured(texts, BLOCK - 1, found).note()
        settings = {"layers": layers, "block_size": BLOCK, "mask_token_id": MASK}
        return network.state_dict() | {name: torch.tensor(value) for name, value in settings.items()}

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree, unread = TokenTree(self.name), lm.target.behind()
        count = min(self._block - unread, self.depth, budget)
        if count < 1:
            return tree
        self._catch_up(lm)
        rows = lm.embed([*lm.tokens[-unread:], *[self._mask] * (self._block - unread)])
        start = len(lm.tokens) - unread
        positions = torch.arange(start, start + self._block, device=rows.device)
        hidden = self.network(rows, positions, self._caches, self._first)[unread:unread + count]
        for share, token in self._best(lm, hidden):
            tree.add(token, len(tree) - 1, confidence=share)
            if lm.ends(token):
                break
        data = {"labels": list(map(lm.piece, tree.tokens)), "values": list(tree.confidence)}
        yield Figure("bars", "probability of each draft token, all of one forward", data)
        return tree

    def _best(self, lm: Lane, hidden: Tensor) -> list[tuple[float, int]]:
        """The best token at each mask with its probability."""
        network = self.network
        logits = lm.read_out(hidden) if network.lm_head is None else network.lm_head(hidden)
        shares, tokens = logits.softmax(-1).max(-1)
        tokens = tokens if network.d2t is None else tokens + network.d2t[tokens]
        return list(zip(*read_lists(shares, tokens)))

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
