"""Hydra's heads and how they draft: each head reads a state of the text and the embeddings of the path before it.

The heads run one after the other, each on all nodes of its level at once. Ankner et al. 2024, arXiv 2402.05109.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Dropout, Linear, Module, ModuleList
from torch.nn.functional import silu

from playground.algorithms.draft_heads.accuracy_tree import Path, best_paths
from playground.algorithms.draft_heads.draft_head import MEASURED, DraftHead
from playground.algorithms.draft_heads.head_layers import ResidualBlock
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    Losses,
    ahead,
    embedded,
    measured,
    trained,
)
from playground.algorithms.draft_heads.scored_tree import tree_figure
from playground.contract import knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.host_copies import read_lists

if TYPE_CHECKING:
    from playground.contract import Lane

HEADS, RANKS = 4, 10
HALVING = 0.5 ** torch.arange(1, RANKS + 1)  # accuracies of a head that was not trained


class GroundedBlock(Module):
    """R s + r + SiLU(A s + a): maps the state with the embeddings of a path [.., reads] to [.., width]."""

    def __init__(self, reads: int, width: int):
        super().__init__()
        self.linear, self.res_connection = Linear(reads, width), Linear(reads, width)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        return self.res_connection(rows) + silu(self.linear(rows))


class PathHeads(Module):
    """Head i reads a state of the text and the embeddings of the i + 1 tokens after it.

    A second block of each head is applied `repeats` times, as in the released code.
    """

    def __init__(self, heads: int, width: int, repeats: int = 0, dropout: float = 0.0):
        super().__init__()
        again = [ResidualBlock(width) for _ in range(heads)] if repeats else []
        self.hydra_mlp = ModuleList(
            ModuleList([GroundedBlock((i + 2) * width, width), *again[i:i + 1]]) for i in range(heads)
        )
        self.repeats, self.dropout = repeats, Dropout(dropout)

    def forward(self, number: int, rows: Tensor) -> Tensor:
        """Inputs of the lm_head [..., width] of one head, for rows [..., (number + 2) * width]."""
        first, *again = self.hydra_mlp[number]
        rows = first(self.dropout(rows))
        for block in again * self.repeats:
            rows = block(self.dropout(rows))
        return self.dropout(rows)


class PathDrafter(DraftHead):
    """Heads whose inputs are the path before them, over a static tree."""

    nodes: int = knob(24, 0, 128, step=1, help="draft tokens in the tree; 0 is plain decoding")
    depth: int = knob(HEADS, 1, 8, step=1, help="heads that are used, at most those that were trained")
    ranks: int = knob(RANKS, 1, RANKS, step=1, help="most children of a node; 1 makes the tree a chain")

    @classmethod
    def loaded(cls, network: Module, weights: dict[str, Tensor]) -> Module:
        """The network with these weights and the accuracies that were measured."""
        network.load_state_dict({name: tensor for name, tensor in weights.items() if name != MEASURED})
        network.accuracy = weights[MEASURED].float()  # no buffer: it stays on the host, which plans the tree
        return network

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget):
        unread = lm.target.behind()
        depth = min(self.depth, budget, len(self.network.hydra_mlp) + 1 - unread)
        if depth < 1 or not self.nodes:
            return TokenTree(self.name)
        known = lm.embed(lm.tokens[-unread:]).reshape(1, -1)
        rows = torch.cat([self.state(lm), known], -1)
        accuracy = self.network.accuracy[unread - 1:][:depth, :self.ranks]
        paths = _paths(tuple(map(tuple, accuracy.tolist())), self.nodes)
        tree = self._grown(lm, rows, unread, paths)
        name = "probability of each draft token after its path, by the heads"
        yield tree_figure(lm, tree, tree.confidence, name)
        return tree

    def state(self, lm: Lane) -> Tensor:
        """The state [1, width] of the text that every head reads."""
        return lm.target.states.of(lm.depth, lm.target.states.length - 1)

    def _grown(self, lm: Lane, rows: Tensor, unread: int, paths: list[Path]) -> TokenTree:
        """The tree of these paths: the children of a node are the best tokens after its own path."""
        tree, nodes, inputs = TokenTree(self.name), {(): ROOT}, {(): rows}
        for level in range(max(map(len, paths), default=0)):
            wanted = [path for path in paths if len(path) == level + 1 and path[:-1] in inputs]
            parents = list(dict.fromkeys(path[:-1] for path in wanted))
            if not parents:
                break
            read = torch.cat([inputs[parent] for parent in parents])
            logits = lm.read_out(self.network(unread - 1 + level, read))
            shares, tokens = read_lists(*logits.softmax(-1).topk(min(self.ranks, lm.vocabulary)))
            for path in wanted:
                row, rank = parents.index(path[:-1]), path[-1]
                if rank < len(tokens[row]):
                    nodes[path] = tree.add(tokens[row][rank], nodes[path[:-1]], confidence=shares[row][rank])
            inputs = self._extended(lm, tree, nodes, inputs, [path for path in wanted if path in nodes])
        return tree

    def _extended(self, lm: Lane, tree: TokenTree, nodes: dict, inputs: dict, paths: list[Path]) -> dict[Path, Tensor]:
        """What the next head reads after each path, without those that end the text."""
        paths = [path for path in paths if not lm.ends(tree.tokens[nodes[path]])]
        if not paths:
            return {}
        embeddings = lm.embed([tree.tokens[nodes[path]] for path in paths]).split(1)
        return {path: torch.cat([inputs[path[:-1]], row], -1) for path, row in zip(paths, embeddings)}


def guesses(network: PathHeads, texts: HeadTexts, batch: HeadBatch, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each head the inputs of the lm_head [n, width] and the right tokens [n], after true paths.

    `rows` [texts, tokens, width] are the states that the heads read.
    """
    for number in range(len(network.hydra_mlp)):
        rows = torch.cat([rows, embedded(texts, batch.ids.roll(-1 - number, 1))], -1)
        places, labels = ahead(batch, number + 2)
        yield network(number, rows[places]), labels[places]


def trained_paths(
    network: PathHeads, texts: HeadTexts, losses: Losses, training: HeadTraining, read: Callable[[HeadBatch], Tensor]
) -> Iterator:
    """Train the heads, and measure how often each rank is right; returns the accuracies [heads, RANKS].

    `read(batch)` gives the states that the heads read.
    """
    yield from trained(network, texts, losses, training)
    heads = len(network.hydra_mlp)
    counts = measured(texts, heads, lambda batch: guesses(network, texts, batch, read(batch)), RANKS)
    yield counts.note()
    return counts.shares


@cache
def _paths(accuracy: tuple[tuple[float, ...], ...], nodes: int) -> list[Path]:
    return best_paths([list(shares) for shares in accuracy], nodes)
