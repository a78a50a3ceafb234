"""Hydra: Medusa heads that know the draft tokens before theirs."""
from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import silu

from playground.algorithms.draft_heads.accuracy_tree import Path, best_paths
from playground.algorithms.draft_heads.draft_head import MEASURED, DraftHead
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    RankCounts,
    ahead,
    embedded,
    ranks,
    token_loss,
    trained,
)
from playground.contract import knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.events import Figure

HEADS, RANKS = 4, 10


class GroundedBlock(Module):
    """R s + r + SiLU(A s + a): maps the state with the embeddings of a path [.., reads] to [.., width]."""

    def __init__(self, reads: int, width: int):
        super().__init__()
        self.linear, self.res_connection = Linear(reads, width), Linear(reads, width)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        return self.res_connection(rows) + silu(self.linear(rows))


class HydraHeads(Module):
    """Head i reads the target's last state and the embeddings of the i + 1 tokens after it."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.hydra_mlp = ModuleList(ModuleList([GroundedBlock((i + 2) * width, width)]) for i in range(heads))

    def forward(self, number: int, rows: Tensor) -> Tensor:
        """Inputs of the lm_head [..., width] of one head, for rows [..., (number + 2) * width]."""
        for block in self.hydra_mlp[number]:
            rows = block(rows)
        return rows


class Hydra(DraftHead):
    """Medusa heads that also read the embeddings of the draft tokens before theirs, so a node's children depend on its
    path.

    The heads run one after the other, each on all nodes of its level at once. The tree has the shape of the paths with
    the largest product of accuracies measured on held-out texts, as in Medusa. The heads end in the target's own
    lm_head; the paper gives each an lm_head of its own. nodes = 0 is plain decoding. Ankner et al. 2024, arXiv
    2402.05109.
    """

    name, title, paper, sheet = "hydra", "Hydra", "2402.05109", "draft-heads/hydra"
    guarantee = ("collapses",)

    nodes: int = knob(24, 0, 128, step=1, help="draft tokens in the tree; 0 is plain decoding")
    depth: int = knob(HEADS, 1, 8, step=1, help="heads that are used, at most those that were trained")
    ranks: int = knob(RANKS, 1, RANKS, step=1, help="most children of a node; 1 makes the tree a chain")

    @classmethod
    def untrained(cls, width, depth):
        halving = 0.5 ** torch.arange(1, RANKS + 1)
        return {**HydraHeads(HEADS, width).state_dict(), MEASURED: halving.repeat(HEADS, 1)}

    @classmethod
    def build(cls, weights):
        heads = 1 + max(int(name.split(".")[1]) for name in weights if name != MEASURED)
        network = HydraHeads(heads, weights["hydra_mlp.0.0.linear.bias"].shape[0])
        network.load_state_dict({name: tensor for name, tensor in weights.items() if name != MEASURED})
        network.register_buffer(MEASURED, weights[MEASURED].float())
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the heads on true paths, and measure how often each rank is right; returns the weights."""
        torch.manual_seed(texts.seed)
        network = HydraHeads(HEADS, texts.width)

        def losses(batch: HeadBatch) -> list[Tensor]:
            return [token_loss(guess, texts.lm_head, labels) for guess, labels in guesses(network, texts, batch)]

        yield from trained(network, texts, losses, HeadTraining(epochs=5, rate=2e-3, decay=0.1))
        counts = RankCounts(HEADS, RANKS)
        with torch.no_grad():
            for batch in texts.held_out():
                for number, (guess, labels) in enumerate(guesses(network, texts, batch)):
                    counts.add(number, ranks(guess, texts.lm_head, labels))
        yield counts.note()
        return {**network.state_dict(), MEASURED: counts.shares}

    @torch.inference_mode()
    def drafted(self, lm, budget):
        states, unread = lm.target.states, lm.target.behind()
        depth = min(self.depth, budget, len(self.network.hydra_mlp) + 1 - unread)
        if depth < 1 or not self.nodes:
            return TokenTree(self.name)
        known = lm.embed(lm.tokens[-unread:]).reshape(1, -1)
        rows = torch.cat([states.of(lm.depth, states.length - 1), known], -1)
        accuracy = self.network.accuracy[unread - 1:][:depth, :self.ranks]
        paths = _paths(tuple(map(tuple, accuracy.tolist())), self.nodes)
        tree = self._grown(lm, rows, unread, paths)
        yield self._figure(lm, tree)
        return tree

    def _grown(self, lm, rows: Tensor, unread: int, paths: list[Path]) -> TokenTree:
        """The tree of these paths: the children of a node are the best tokens after its own path."""
        tree, nodes, inputs = TokenTree(self.name), {(): ROOT}, {(): rows}
        for level in range(max(map(len, paths), default=0)):
            wanted = [path for path in paths if len(path) == level + 1 and path[:-1] in inputs]
            parents = list(dict.fromkeys(path[:-1] for path in wanted))
            if not parents:
                break
            read = torch.cat([inputs[parent] for parent in parents])
            logits = lm.read_out(self.network(unread - 1 + level, read))
            shares, tokens = (part.tolist() for part in logits.softmax(-1).topk(min(self.ranks, lm.vocabulary)))
            for path in wanted:
                row, rank = parents.index(path[:-1]), path[-1]
                if rank < len(tokens[row]):
                    nodes[path] = tree.add(tokens[row][rank], nodes[path[:-1]], confidence=shares[row][rank])
            inputs = self._extended(lm, tree, nodes, inputs, [path for path in wanted if path in nodes])
        return tree

    def _extended(self, lm, tree: TokenTree, nodes: dict, inputs: dict, paths: list[Path]) -> dict[Path, Tensor]:
        """What the next head reads after each path, without those that end the text."""
        paths = [path for path in paths if not lm.ends(tree.tokens[nodes[path]])]
        if not paths:
            return {}
        embeddings = lm.embed([tree.tokens[nodes[path]] for path in paths]).split(1)
        return {path: torch.cat([inputs[path[:-1]], row], -1) for path, row in zip(paths, embeddings)}

    def _figure(self, lm, tree: TokenTree) -> Figure:
        labels = ["text so far", *map(lm.piece, tree.tokens)]
        data = {"labels": labels, "parents": [-1, *(p + 1 for p in tree.parents)], "values": [1.0, *tree.confidence]}
        return Figure("tree", "probability of each draft token after its path, by the heads", data)


def guesses(network: HydraHeads, texts: HeadTexts, batch: HeadBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """For each head the inputs of the lm_head [n, width] and the right tokens [n], after true paths."""
    rows = batch.states[texts.depth]
    for number in range(len(network.hydra_mlp)):
        rows = torch.cat([rows, embedded(texts, batch.ids.roll(-1 - number, 1))], -1)
        places, labels = ahead(batch, number + 2)
        yield network(number, rows[places]), labels[places]


@cache
def _paths(accuracy: tuple[tuple[float, ...], ...], nodes: int) -> list[Path]:
    return best_paths([list(shares) for shares in accuracy], nodes)
