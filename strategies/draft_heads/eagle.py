"""EAGLE: an autoregressive head over the target's last hidden states."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear, smooth_l1_loss

from playground.algorithms.draft_heads.feature_drafter import FeatureDrafter, GrowingTree
from playground.algorithms.draft_heads.feature_networks import EagleNetwork, soft_loss
from playground.algorithms.draft_heads.head_layers import HeadShape, WholeTexts
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    ahead,
    embedded,
    ranks,
    trained,
)
from playground.contract import knob
from playground.contract.token_tree import ROOT
from playground.engine.host_copies import read_lists

CHILDREN = """
    :4 0:3 1:2 2:2 3:1
    00:3 01:2 02:2 10:1
    000:3
    0000:2
"""  # path of ranks:number of children, the tree of the released code
TOKEN_LOSS = 0.1  # weight of the loss on tokens beside that on hidden states


class Eagle(FeatureDrafter):
    """A head of one decoder layer continues the target's hidden states, and the target's own lm_head reads tokens from
    its output.

    Beside the last state the head gets the embedding of the token that was chosen after it, which removes most of the
    uncertainty about the next state. Its output is fed back for the next level. The draft tree has a fixed shape, given
    as ranks, and siblings are the most probable tokens instead of sampled ones, so the verification is exact with any
    rule for deterministic draft tokens. nodes = 0 is plain decoding; fewer nodes than the paper's 25 leave out the
    largest ranks. Li et al. 2024, arXiv 2401.15077.
    """

    name, title, paper, sheet = "eagle", "EAGLE", "2401.15077", "draft-heads/medusa-baseline"
    guarantee = ("collapses",)

    nodes: int = knob(25, 0, 25, step=1, help="draft tokens in the tree; 0 is plain decoding")

    @classmethod
    def untrained(cls, width, depth):
        return EagleNetwork(HeadShape.like(width)).state_dict()

    @classmethod
    def build(cls, weights):
        return EagleNetwork.of(weights)

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the head on the next hidden state and on the target's distribution there; returns the weights."""
        torch.manual_seed(texts.seed)
        network = EagleNetwork(HeadShape.like(texts.width))

        def losses(batch: HeadBatch) -> list[Tensor]:
            found, (places, _) = predicted(network, texts, batch), ahead(batch, 2)
            true = batch.states[texts.depth][:, 1:][places[:, :-1]]
            with torch.no_grad():
                teacher = linear(true, texts.lm_head).softmax(-1)
            guess = found[places]
            return [smooth_l1_loss(guess, true) + TOKEN_LOSS * soft_loss(linear(guess, texts.lm_head), teacher)]

        yield from trained(network, texts, losses, HeadTraining(epochs=12, rate=1e-3, noise=0.1))
        counts = RankCounts(1, 10)
        with torch.no_grad():
            for batch in texts.held_out():
                places, labels = ahead(batch, 2)
                counts.add(0, ranks(predicted(network, texts, batch)[places], texts.lm_head, labels[places]))
        yield counts.note()
        return network.state_dict()

    def grow(self, growing: GrowingTree, depth: int) -> list[int]:
        shape = {path: count for path, count in children(self.nodes).items() if len(path) < depth}
        nodes, frontier = {(): ROOT}, [()]
        while frontier := [path for path in frontier if path in shape and path in nodes]:
            logp = growing.rows([nodes[path] for path in frontier])
            wide = max(shape[path] for path in frontier)
            frontier = [
                self._child(growing, nodes, path, rank, row)
                for path, row in zip(frontier, _best(growing, logp, wide))
                for rank in range(min(shape[path], len(row)))
            ]
        return list(range(len(growing.tree)))

    def _child(self, growing: GrowingTree, nodes: dict, path: tuple, rank: int, row: list) -> tuple[int, ...]:
        """Add the child of this rank; an end token gets no children."""
        chance, token = row[rank]
        node = growing.add_one(nodes[path], token, chance)
        if not growing.lm.ends(token):
            nodes[(*path, rank)] = node
        return (*path, rank)


def predicted(network: EagleNetwork, texts: HeadTexts, batch: HeadBatch) -> Tensor:
    """The head's output [texts, tokens, width] for the state after the next token; the last row has no next token."""
    following = embedded(texts, batch.ids.roll(-1, 1))
    return network(following, network.features(batch.states[texts.depth]), WholeTexts(batch.ids.shape[1]))


def children(nodes: int) -> dict[tuple[int, ...], int]:
    """How many children each path of ranks has, in the tree of the `nodes` paths with the smallest ranks."""
    counts = (entry.split(":") for entry in CHILDREN.split())
    paths = [(*map(int, path), rank) for path, count in counts for rank in range(int(count))]
    chosen = sorted(paths, key=lambda path: (sum(path) + len(path), len(path), path))[:nodes]
    found: dict[tuple[int, ...], int] = {}
    for path in chosen:
        found[path[:-1]] = found.get(path[:-1], 0) + 1
    return found


def _best(growing: GrowingTree, logp: Tensor, wide: int) -> list[list[tuple[float, int]]]:
    """The most probable tokens of each row with their log-probabilities."""
    values, ids = logp.topk(min(wide, logp.shape[-1]))
    ids = growing.text.network.target_ids(ids)
    return [list(zip(chances, tokens)) for chances, tokens in zip(*read_lists(values, ids))]
