"""DFlash: a small diffusion model over the target's hidden states fills a whole block of draft tokens at once."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from playground.algorithms.draft_heads.blocks.block_drafter import BLOCK, BlockDrafter
from playground.algorithms.draft_heads.blocks.block_network import DFlashNetwork, Reach
from playground.algorithms.draft_heads.blocks.block_training import guesses, losses
from playground.algorithms.draft_heads.head_layers import HeadShape
from playground.algorithms.draft_heads.head_training import HeadTexts, HeadTraining, measured, trained
from playground.algorithms.draft_heads.scored_tree import add_chain, chain_figure

LAYERS, MASK = 2, 0  # of a drafter that is trained here: its layers, and the token in place of a mask


class DFlash(BlockDrafter):
    """A few layers fill a block of masks after the newest token in one forward, so that drafting deep costs no more.

    The rows of the block see each other in both directions, and the text through the target's hidden states of some
    layers, which each of the drafter's layers turns into keys and values of its own. The best token at each mask makes
    a chain. Published drafters are read from a folder: `--draft FOLDER`, or `fit dflash --from FOLDER`. The one for the
    bundled target has two layers instead of five. depth = 0 is plain decoding. Chen et al. 2026, arXiv 2602.06036.
    """

    name, title, paper, sheet = "dflash", "DFlash", "2602.06036", "draft-heads/public-formats"
    guarantee = ("collapses",)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train blocks of masks after random anchors on the tokens that the target wrote; returns the weights."""
        layers = cls.state_layers(cls(), texts.depth)
        torch.manual_seed(texts.seed)
        network = DFlashNetwork(HeadShape.like(texts.width), len(layers) * texts.width, [Reach()] * LAYERS)
        inputs = next(texts.batches(0)).states[texts.depth]
        network.norm.weight.data = inputs.square().mean((0, 1)).sqrt()  # the scale that the lm_head expects
        found = partial(guesses, network, texts, layers=layers, block=BLOCK, mask=MASK)
        training = HeadTraining(epochs=6, rate=1e-3)
        yield from trained(network, texts, lambda batch: losses(found(batch), texts.lm_head), training)
        yield measured(texts, BLOCK - 1, found).note()
        settings = {"layers": layers, "block_size": BLOCK, "mask_token_id": MASK}
        return network.state_dict() | {name: torch.tensor(value) for name, value in settings.items()}

    def draft(self, lm, hidden, rows, tree):
        add_chain(lm, tree, self.network.read_out(hidden[rows.start:rows.stop], lm.read_out), self.network.target_ids)
        yield chain_figure(lm, tree)
