"""Chimera: trigrams of draft tokens, and one layer that attends to the target's states of the whole text."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.nn.functional import linear

from playground.algorithms.draft_heads.committed_rows import CommittedRows
from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.feature_networks import UnrolledTexts, shape_of, soft_loss
from playground.algorithms.draft_heads.head_layers import DecoderLayer, HeadShape, NewRows, Place, ResidualBlock
from playground.algorithms.draft_heads.head_training import (
    HeadBatch,
    HeadTexts,
    HeadTraining,
    ahead,
    embedded,
    measured,
    teacher,
    token_loss,
    trained,
)
from playground.algorithms.draft_heads.scored_tree import DraftRows, ScoredTree, grow_most_probable, paths_figure
from playground.contract import knob
from playground.contract.token_tree import ROOT, TokenTree

if TYPE_CHECKING:
    from playground.contract import Lane

HEADS, WINDOW = 4, 3
SOFT_LOSS = 0.1  # weight of the loss on the target's distribution beside that on its token


class TrigramEncoder(Module):
    """A state for a token, of its embedding and those of the two tokens before it."""

    def __init__(self, width: int):
        super().__init__()
        self.block, self.out = ResidualBlock(WINDOW * width), Linear(WINDOW * width, width, bias=False)

    def forward(self, windows: Tensor) -> Tensor:
        return self.out(self.block(windows))


class FusingNetwork(Module):
    """The layer attends to the target's states of the text and to trigram states of the tokens after it.

    Head i reads the target's last state beside the layer's output for the i-th token after it.
    """

    def __init__(self, heads: int, shape: HeadShape):
        super().__init__()
        self.trigram, self.layer = TrigramEncoder(shape.width), DecoderLayer(shape)
        self.heads = ModuleList(Linear(2 * shape.width, shape.width, bias=False) for _ in range(heads))

    def begin(self) -> None:
        """Make every head add its two inputs, as before a training."""
        with torch.no_grad():
            for head in self.heads:
                head.weight.copy_(torch.eye(len(head.weight)).repeat(1, 2))

    def output(self, number: int, states: Tensor, fused: Tensor) -> Tensor:
        """Inputs of the lm_head [..., width] of one head."""
        return self.heads[number](torch.cat([states, fused], -1))


class FusingTree(ScoredTree):
    """A draft tree with the layer's output after each node that is expanded."""

    def __init__(self, lm: Lane, network: FusingNetwork, rows: CommittedRows, tree: TokenTree):
        super().__init__(lm, tree)
        self.network, cache, states = network, rows.caches[0], lm.target.states
        self._state, self._text = states.of(lm.depth, states.length - 1), lm.tokens
        positions = torch.arange(states.length, len(lm.tokens), device=self._state.device)
        windows = [window(lm.tokens[:position + 1]) for position in range(states.length, len(lm.tokens))]
        self._after = self._fused(windows, NewRows(cache, positions))[-1:]  # of the last committed token
        self._number, self._rows = len(positions) - 1, DraftRows(cache)

    def rows(self, nodes: list[int]) -> Tensor:
        fused = self._after
        if nodes != [ROOT]:
            windows = [window([*self._text, *self.tree.prefix(node)]) for node in nodes]
            fused = self._fused(windows, self._rows.place(self.tree, nodes, len(self._text), self._state.device))
            self._number += 1
        outputs = self.network.output(self._number, self._state.expand(len(fused), -1), fused)
        return self.lm.read_out(outputs).log_softmax(-1)

    def _fused(self, windows: list[list[int]], place: Place) -> Tensor:
        """The layer's output [n, width] for tokens with these windows."""
        embeddings = self.lm.embed([token for each in windows for token in each])
        return self.network.layer(self.network.trigram(embeddings.reshape(len(windows), -1)), place)


class Chimera(DraftHead):
    """A small head that still looks at every token: trigrams of the newest tokens, and one layer over the target's last
    states of the whole text.

    The tokens after the text that the target has read have no states yet; an encoder of three embeddings replaces
    each. The layer attends from them to the text and to the draft tokens before, and a head for each depth adds its
    output to the target's last state before the target's own lm_head. When tokens are accepted, their trigram states
    are replaced by the target's. The paper gives each head an lm_head of its own, and drafts every combination of three
    tokens per depth; here the most probable paths make the tree. nodes = 0 is plain decoding. Zeng et al. 2024, arXiv
    2402.15758.
    """

    name, title, paper, sheet = "chimera", "Chimera", "2402.15758", "draft-heads/chimera"
    guarantee, sure = ("collapses",), "medium"

    nodes: int = knob(32, 0, 64, step=1, help="draft tokens in the tree; 0 is plain decoding")
    depth: int = knob(HEADS, 1, 6, step=1, help="heads that are used, at most those that were trained")
    width: int = knob(3, 1, 10, step=1, help="paths that are expanded on each level, and children of each")

    def __post_init__(self):
        super().__post_init__()
        self._rows = CommittedRows()

    @classmethod
    def _fresh(cls, width: int) -> FusingNetwork:
        network = FusingNetwork(HEADS, HeadShape.like(width))
        network.begin()
        return network

    @classmethod
    def untrained(cls, width, depth):
        return cls._fresh(width).state_dict()

    @classmethod
    def build(cls, weights):
        heads = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("heads."))
        network = FusingNetwork(heads, shape_of(weights, "layer.", weights["trigram.out.weight"].shape[0]))
        network.load_state_dict(weights)
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train it on the target's tokens and distributions, each depth after its own guesses; returns the weights."""
        torch.manual_seed(texts.seed)
        network = cls._fresh(texts.width)

        def losses(batch: HeadBatch) -> list[Tensor]:
            return [
                token_loss(rows, texts.lm_head, labels)
                + SOFT_LOSS * soft_loss(linear(rows, texts.lm_head), teacher(texts, batch, number + 2))
                for number, (rows, labels) in enumerate(guesses(network, texts, batch))
            ]

        yield from trained(network, texts, losses, HeadTraining(epochs=8, rate=1e-3))
        yield measured(texts, HEADS, lambda batch: guesses(network, texts, batch)).note()
        return network.state_dict()

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget):
        tree, unread = TokenTree(self.name), lm.target.behind()
        depth = min(self.depth, budget, len(self.network.heads) + 1 - unread)
        if depth < 1 or not self.nodes:
            return tree
        self._catch_up(lm)
        growing = FusingTree(lm, self.network, self._rows, tree)
        chosen = grow_most_probable(growing, depth, self.width, self.nodes)
        yield paths_figure(growing, chosen, "by the heads")
        return tree.only(chosen)

    def _catch_up(self, lm: Lane) -> None:
        """Let the layer read the target's states of the text."""
        def read(span: range, places: list[Place]) -> Tensor:
            return self.network.layer(lm.target.states.of(lm.depth, span.start)[:len(span)], places[0])

        self._rows.catch_up(lm, read)


def window(tokens: list[int]) -> list[int]:
    """The last three tokens; at the start of a text, as the released code pads it."""
    if len(tokens) >= WINDOW:
        return tokens[-WINDOW:]
    return [tokens[0], *tokens[-1:], *tokens[-1:]]


def guesses(network: FusingNetwork, texts: HeadTexts, batch: HeadBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """For each head the inputs of the lm_head [n, width] and the right tokens [n].

    Row t of a text reads its states up to t, token t + 1, and what the heads before guessed to follow.
    """
    states, count = batch.states[texts.depth], batch.ids.shape[1]
    place = UnrolledTexts(None, count)
    network.layer.self_attn(network.layer.input_layernorm(states), place)  # for its key and value states
    tokens = [batch.ids.roll(1, 1), batch.ids, batch.ids.roll(-1, 1)]
    for number in range(len(network.heads)):
        place = UnrolledTexts(place, count)
        windows = torch.cat([embedded(texts, ids) for ids in (tokens[-WINDOW:] if number else padded(tokens))], -1)
        rows = network.output(number, states, network.layer(network.trigram(windows), place))
        places, labels = ahead(batch, number + 2)
        yield rows[places], labels[places]
        with torch.no_grad():
            tokens.append(linear(rows, texts.lm_head).argmax(-1))


def padded(windows: list[Tensor]) -> list[Tensor]:
    """Windows [texts, tokens] that end with each text's second token, third and so on, as `window` pads the first."""
    first, second, third = (ids.clone() for ids in windows)
    first[:, 0], second[:, 0] = windows[1][:, 0], third[:, 0]
    return [first, second, third]
