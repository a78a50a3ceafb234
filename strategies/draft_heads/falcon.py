"""Falcon: a semi-autoregressive head that drafts a block of tokens in each of its passes."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import LSTM, Module, ModuleList
from torch.nn.functional import linear, scaled_dot_product_attention, smooth_l1_loss

from playground.algorithms.draft_heads.accuracy_tree import Path, best_paths
from playground.algorithms.draft_heads.committed_rows import CHUNK
from playground.algorithms.draft_heads.draft_head import MEASURED, DraftHead
from playground.algorithms.draft_heads.feature_networks import FeatureLayer, shape_of, soft_loss
from playground.algorithms.draft_heads.head_layers import HeadCache, HeadShape, NewRows, Place
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    ahead,
    embedded,
    measured,
    token_loss,
    trained,
)
from playground.algorithms.draft_heads.scored_tree import tree_figure
from playground.contract import knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.host_copies import moved, read_lists

if TYPE_CHECKING:
    from playground.contract import Lane

BLOCK, RANKS, LSTM_LAYERS = 2, 10, 2
TOKEN_LOSS = 0.1  # weight of the loss on tokens beside that on states
SOFT, HARD, TEMPERATURE = 0.9, 0.1, 0.95  # of the loss on tokens: on distributions at a temperature, and on tokens
GLANCES = (0.35, 0.1)  # share of the wrong rows that glance: the first part decays to 0
HALVING = 0.5 ** torch.arange(1, RANKS + 1)  # accuracies of a head that was not trained

Memory = tuple[Tensor, Tensor]
"""Hidden and cell states of the LSTM, [layers, width] or [layers, paths, width]."""


class BlockNetwork(Module):
    """An LSTM over pairs of a state and the next token, then one layer that attends within blocks in both directions.

    The output of row i predicts the state `block` tokens later.
    """

    def __init__(self, block: int, shape: HeadShape):
        super().__init__()
        self.block = block
        self.lstm = LSTM(2 * shape.width, shape.width, LSTM_LAYERS, batch_first=True)
        self.layers = ModuleList([FeatureLayer(shape)])

    def forward(
        self, embeddings: Tensor, states: Tensor, place: Place, memory: Memory | None = None
    ) -> tuple[Tensor, Memory]:
        """Outputs [..., rows, width] and the LSTM's memory after the last row."""
        rows, memory = self.lstm(torch.cat([embeddings, states], -1), memory)
        paths = rows.shape[:-1]  # the layer sees all paths as one sequence while drafting
        rows = rows.flatten(0, -2) if isinstance(place, NewRows) else rows
        return self.layers[0](rows, place).reshape(*paths, -1), memory


class BlockTexts:
    """Rows that are whole texts: each attends to its own block and to those before."""

    def __init__(self, rows: int, block: int):
        self.positions = torch.arange(rows)
        self._mask = blocks_seen(rows, block)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, keys, values, self._mask, enable_gqa=True)


def blocks_seen(rows: int, block: int) -> Tensor:
    """Which rows each of some rows attends to, bool [rows, rows]: those of its block of this size, and earlier ones."""
    number = torch.arange(rows) // block
    return number[:, None] >= number[None]


@dataclass
class PassOutput:
    """The network's outputs for one block of rows, after the text or after a path of draft tokens."""

    states: Tensor  # [block, width], which stand for those of the next tokens
    memory: Memory  # [layers, width]
    columns: list[int]  # rows of the cache after the text that the next block sees
    shares: list[list[float]]  # probabilities of the best tokens [block][ranks]
    tokens: list[list[int]]


class BlockedText:
    """The head's rows over the text: whole blocks from its start on, then a shorter one, then the newest `block` rows.

    Only the blocks are kept from round to round: the others are computed again, because blocks have to end with the
    text.
    """

    def __init__(self, network: BlockNetwork):
        self.network, self.cache = network, HeadCache()
        self._first, self._read, self._memory = 0, [], None  # the tokens on which kept rows depend

    def catch_up(self, lm: Lane) -> tuple[Tensor, Memory]:
        """Outputs [block, width] of the newest rows, and the memory after them."""
        states, block = lm.target.states, self.network.block
        count = states.length - states.start
        kept = (count - block) // block * block
        tokens = lm.tokens[states.start:states.length + 1]
        if states.start != self._first or tokens[:len(self._read)] != self._read or len(self._read) > kept + 1:
            self.cache.crop(0)
            self._memory = None
        self.cache.crop(self.cache.length)
        self._first, self._read = states.start, tokens[:kept + 1]
        while self.cache.length < kept:
            first, rows = self.cache.length, min(CHUNK // block * block, kept - self.cache.length)
            self._memory = self._fed(lm, first, blocks_seen(rows, block))[1]
            self.cache.commit()
        ends = torch.ones(count - kept, count - kept, dtype=torch.bool)
        ends[:-block, -block:] = False
        output, memory = self._fed(lm, kept, ends)
        return output[-block:], memory

    def _fed(self, lm: Lane, first: int, seen: Tensor) -> tuple[Tensor, Memory]:
        """Read as many rows as `seen` has, from this one on."""
        start = lm.target.states.start + first
        states = lm.target.states.of(lm.depth, start)[:len(seen)]
        positions = torch.arange(start, start + len(seen), device=states.device)
        embeddings = lm.embed(lm.tokens[start + 1:start + 1 + len(seen)])
        place = NewRows(self.cache, positions, moved(seen, states.device))
        return self.network(embeddings, states, place, self._memory)


class BlockTree:
    """A draft tree that grows by a block of levels in each pass, along paths of ranks."""

    def __init__(self, lm: Lane, network: BlockNetwork, ranks: int, name: str):
        self.lm, self.network, self.ranks, self.tree = lm, network, ranks, TokenTree(name)
        self.known = lm.tokens[lm.target.states.length + 1:]  # committed tokens that take the first levels
        self.nodes: dict[Path, int] = {(): ROOT}
        self.blocks: dict[Path, PassOutput] = {}

    def begin(self, text: BlockedText) -> None:
        """The first pass: the block after the text."""
        states, memory = text.catch_up(self.lm)
        columns = list(range(text.cache.rows - text.cache.length))
        self.cache = text.cache
        self.blocks = {(): self._read_out([states], [memory], [columns])[0]}

    def grow(self, paths: list[Path]) -> None:
        """Add these paths of ranks, the parents first; a pass for each block of levels."""
        block, waiting = self.network.block, paths
        levels = max(map(len, paths), default=0) + len(self.known)
        for first in range(0, levels, block):
            last = first + block - len(self.known)  # length of the paths that end this block
            for path in [path for path in waiting if len(path) <= last]:
                self._add(path, len(path) + len(self.known) - 1 - first, path[:max(0, last - block)])
            waiting = [path for path in waiting if len(path) > last]
            parents = dict.fromkeys(path[:max(0, last)] for path in waiting)
            self._pass([path for path in parents if path in self.nodes], first, max(0, last - block))
            if not self.blocks:
                break

    def _add(self, path: Path, place: int, parent: Path) -> None:
        """Add a node whose token is at this place of the block after `parent`, unless its path has ended."""
        block, rank = self.blocks.get(parent), path[-1]
        if block is None or path[:-1] not in self.nodes or rank >= len(block.tokens[place]):
            return
        token = block.tokens[place][rank]
        node = self.tree.add(token, self.nodes[path[:-1]], confidence=block.shares[place][rank])
        if not self.lm.ends(token):
            self.nodes[path] = node

    def _pass(self, paths: list[Path], first: int, before: int) -> None:
        """Read the block of levels from `first` on at the end of each path, after the block at its length `before`."""
        count, block, cache = len(paths), self.network.block, self.cache
        if not paths:
            self.blocks = {}
            return
        earlier = [self.blocks[path[:before]] for path in paths]
        tokens = [[*self.known, *self.tree.prefix(self.nodes[path])][first:first + block] for path in paths]
        embeddings = self.lm.embed([token for each in tokens for token in each]).unflatten(0, (count, block))
        start = cache.rows - cache.length
        columns = [[*each.columns, *range(start + row * block, start + (row + 1) * block)]
                   for row, each in enumerate(earlier)]
        memory = tuple(torch.stack([each.memory[part] for each in earlier], 1) for part in (0, 1))
        states, memory = self.network(
            embeddings, torch.stack([each.states for each in earlier]), self._place(columns, start, first), memory
        )
        memories = list(zip(*(part.unbind(1) for part in memory)))
        self.blocks = dict(zip(paths, self._read_out(list(states), memories, columns)))

    def _place(self, columns: list[list[int]], start: int, first: int) -> NewRows:
        """New rows after `start` others, one block for each list of columns that it sees."""
        block, device = self.network.block, self.lm.target_model.device
        seen = torch.zeros(len(columns), block, start + len(columns) * block, dtype=torch.bool)
        for row, each in enumerate(columns):
            seen[row, :, each] = True
        begin = self.lm.target.states.length + first
        positions = torch.arange(begin, begin + block, device=device).repeat(len(columns))
        return NewRows(self.cache, positions, moved(seen.flatten(0, 1), device))

    def _read_out(
        self, states: list[Tensor], memories: list[Memory], columns: list[list[int]]
    ) -> list[PassOutput]:
        """The outputs for blocks, with the best tokens at each of their places."""
        shares = self.lm.read_out(torch.cat(states)).softmax(-1)
        best = shares.topk(min(self.ranks, self.lm.vocabulary))
        values, tokens = read_lists(*(part.unflatten(0, (len(states), -1)) for part in best))
        return [PassOutput(*each) for each in zip(states, memories, columns, values, tokens)]


class Falcon(DraftHead):
    """A head over the target's last states that drafts two tokens in each of its passes.

    An LSTM and a layer with attention in both directions within a block predict the next block of states at once, from
    the last block of states and tokens; the target's lm_head reads tokens from them, and the next pass continues each
    path of the tree. In training some rows glance at the answer for a part of their block, at first many. The tree has
    a fixed shape: the paths of ranks with the largest product of accuracies, which are measured in the first pass and
    taken to be the same in later ones; the paper lists its tree. passes = 0 is plain decoding. Gao et al. 2024, arXiv
    2412.12639.
    """

    name, title, paper, sheet = "falcon", "Falcon", "2412.12639", "draft-heads/falcon"
    guarantee, sure = ("collapses",), "medium"

    nodes: int = knob(48, 0, 128, step=1, help="draft tokens in the tree; 0 is plain decoding")
    passes: int = knob(4, 0, 6, step=1, help="passes of the head, a block of levels each; 0 is plain decoding")
    ranks: int = knob(RANKS, 1, RANKS, step=1, help="most children of a node; 1 makes the tree a chain")

    def __post_init__(self):
        super().__post_init__()
        self._text: BlockedText | None = None

    @classmethod
    def untrained(cls, width, depth):
        network = BlockNetwork(BLOCK, HeadShape.like(width))
        return {**network.state_dict(), "block": torch.tensor(BLOCK), MEASURED: HALVING.repeat(BLOCK, 1)}

    @classmethod
    def build(cls, weights):
        width = weights["lstm.weight_hh_l0"].shape[1]
        network = BlockNetwork(int(weights["block"]), shape_of(weights, "layers.0.", width))
        network.load_state_dict({name: part for name, part in weights.items() if name not in ("block", MEASURED)})
        network.accuracy = weights[MEASURED].float()  # no buffer: it stays on the host, which plans the tree
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train with glances at the answers; returns the weights and the accuracies of a block's places."""
        torch.manual_seed(texts.seed)
        network = BlockNetwork(BLOCK, HeadShape.like(texts.width))

        def losses(batch: HeadBatch) -> list[Tensor]:
            inputs = pairs(texts, batch)
            glances = glanced(network, texts, batch, inputs)
            inputs = [torch.where(glances[..., None], part.roll(-BLOCK, 1), part) for part in inputs]
            return [block_loss(texts, batch, outputs(network, *inputs), ~glances)]

        yield from trained(network, texts, losses, HeadTraining(epochs=9, rate=1e-3, noise=0.1))
        counts = measured(texts, BLOCK, lambda batch: by_place(outputs(network, *pairs(texts, batch)), batch), RANKS)
        yield counts.note()
        return {**network.state_dict(), "block": torch.tensor(BLOCK), MEASURED: counts.shares}

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget):
        block, unread, states = self.network.block, lm.target.behind(), lm.target.states
        levels = min(self.passes * block - unread + 1, budget)
        if levels < 1 or not self.nodes or states.length - states.start < block:
            return TokenTree(self.name)
        self._text = self._text or BlockedText(self.network)
        growing = BlockTree(lm, self.network, self.ranks, self.name)
        growing.begin(self._text)
        growing.grow(_paths(self._accuracy(unread, levels), self.nodes))
        tree = growing.tree
        yield tree_figure(lm, tree, tree.confidence, "probability of each draft token at its place, by the head")
        return tree

    def _accuracy(self, unread: int, levels: int) -> tuple[tuple[float, ...], ...]:
        """How often each rank is right, by level of the tree."""
        known = self.network.accuracy[:, :self.ranks].tolist()
        return tuple(tuple(known[(unread - 1 + level) % len(known)]) for level in range(levels))


def pairs(texts: HeadTexts, batch: HeadBatch) -> list[Tensor]:
    """What row i reads: the embedding of token i + 1 and the state of token i, [texts, tokens, width] each."""
    return [embedded(texts, batch.ids.roll(-1, 1)), batch.states[texts.depth]]


def outputs(network: BlockNetwork, embeddings: Tensor, states: Tensor) -> Tensor:
    """States [texts, tokens, width], each for the token BLOCK later."""
    return network(embeddings, states, BlockTexts(states.shape[1], BLOCK))[0]


@torch.no_grad()
def glanced(network: BlockNetwork, texts: HeadTexts, batch: HeadBatch, inputs: list[Tensor]) -> Tensor:
    """Rows that are shown the answer, bool [texts, tokens]: a decaying share of as many as are wrong, at random."""
    places, labels = ahead(batch, BLOCK + 1)
    found = linear(outputs(network, *inputs), texts.lm_head).argmax(-1)
    wrong = (places & (found != labels)).sum(1)
    first, rest = GLANCES
    count = (wrong * (first * (1 - batch.share) + rest)).round()
    chance = torch.Generator().manual_seed(texts.seed + round(batch.share * 1e9))  # the same after an interruption
    order = torch.rand(places.shape, generator=chance).masked_fill(~places, 2).argsort(1).argsort(1)
    return order < count[:, None]


def block_loss(texts: HeadTexts, batch: HeadBatch, found: Tensor, wanted: Tensor) -> Tensor:
    """How far outputs [texts, tokens, width] are from the target's states and tokens, at the rows that are wanted."""
    places, labels = ahead(batch, BLOCK + 1)
    chosen = wanted[places]
    if not chosen.any():
        return found.sum() * 0
    rows, true = found[places][chosen], batch.states[texts.depth].roll(-BLOCK, 1)[places][chosen]
    sharper = (linear(true, texts.lm_head) / TEMPERATURE).softmax(-1)
    soft = soft_loss(linear(rows, texts.lm_head) / TEMPERATURE, sharper)
    hard = token_loss(rows, texts.lm_head, labels[places][chosen])
    return smooth_l1_loss(rows, true) + TOKEN_LOSS * (SOFT * soft + HARD * hard)


def by_place(found: Tensor, batch: HeadBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """For each place in a block the outputs [n, width] and the right tokens [n]."""
    places, labels = ahead(batch, BLOCK + 1)
    for place in range(BLOCK):
        own = places & (torch.arange(places.shape[1]) % BLOCK == place)
        yield found[own], labels[own]


@cache
def _paths(accuracy: tuple[tuple[float, ...], ...], nodes: int) -> list[Path]:
    return best_paths([list(shares) for shares in accuracy], nodes)
