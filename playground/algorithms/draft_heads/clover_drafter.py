"""What Clover and Clover-2 share: an attention decoder that merges each draft token into a running state, augmenting
layers over the text, and a draft tree with a small budget. Xiao et al. 2024, arXiv 2405.00263.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, RMSNorm
from torch.nn.functional import cosine_similarity

from playground.algorithms.draft_heads.committed_rows import CommittedRows
from playground.algorithms.draft_heads.draft_head import DraftHead
from playground.algorithms.draft_heads.head_layers import EPS, DecoderLayer, Place
from playground.algorithms.draft_heads.scored_tree import ScoredTree, paths_figure
from playground.contract import knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.host_copies import on_device, read_lists
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import Lane

HEAD_DIM = 64  # of the attention decoder, if it divides the width


class AttentionDecoder(Module):
    """s + a v: adds the value of a token to a state, in each attention head as much as the state's query is similar to
    the token's key.

    A query has a single key, so a softmax would always be 1: `a` is their cosine.
    """

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.heads = width // HEAD_DIM if width % HEAD_DIM == 0 else 1
        self.input_layernorm = RMSNorm(width, EPS)
        self.q, self.k, self.v = (Linear(width, width, bias=bias) for _ in range(3))

    def begin(self) -> None:
        """Make it leave states as they are, as before a training."""
        with torch.no_grad():
            for part in (self.q, self.k):
                part.weight.uniform_(0, 0.01).add_(torch.eye(len(part.weight)))
            self.v.weight.zero_()
            for part in (self.q, self.k, self.v):
                if part.bias is not None:
                    part.bias.zero_()

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """States [..., width] after tokens with embeddings [..., width]."""
        values = self.v(embeddings).unflatten(-1, (self.heads, -1))
        return states + (self.similarity(states, embeddings)[..., None] * values).flatten(-2)

    def similarity(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """The weight [..., heads] of each token in each attention head, from -1 to 1."""
        query, keys = self.q(self.input_layernorm(states)), self.k(embeddings)
        query, keys = (part.unflatten(-1, (self.heads, -1)) for part in (query, keys))
        return cosine_similarity(query, keys, dim=-1, eps=EPS)


class CloverNetwork(Module):
    """Augmenting layers over the target's last states, and heads that pass a state on from token to token."""

    count: int  # of the heads
    layers: ModuleList
    ahead = 0  # tokens after a row's own that its augmenting layers read

    def token_vectors(self, lm_head_rows: Tensor) -> Tensor:
        """Embeddings of tokens, [..., width], from their rows of the target's lm_head."""
        return lm_head_rows

    def augmented(self, states: Tensor, following: Tensor, places: list[Place]) -> Tensor:
        """States [..., width] that the heads begin with, of the target's; `following` are the next tokens' vectors."""
        raise NotImplementedError

    def step(self, number: int, states: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """States after another token, and the inputs of the lm_head that head `number` computes from them."""
        raise NotImplementedError

    def through(self, rows: Tensor, places: list[Place]) -> Tensor:
        """Rows after all augmenting layers."""
        for layer, place in zip(self.layers, places):
            rows = layer(rows, place)
        return rows


class LevelRule(NamedTuple):
    """Which children of a node are drafted."""

    width: int  # at most
    top_p: float  # until their probabilities add up to this
    ratio: float  # and at least this share of the best child's probability

    def children(self, logp: Tensor) -> list[list[tuple[float, int]]]:
        """Log-probabilities and tokens of the children, for each of these rows [n, V]."""
        values, ids = logp.topk(min(self.width, logp.shape[-1]))
        shares = values.exp()
        kept = (shares.cumsum(-1) - shares < self.top_p) & (shares >= self.ratio * shares[:, :1])
        kept[:, 0] = True
        rows = zip(*read_lists(values, ids, kept))
        return [[child for *child, stays in zip(*row) if stays] for row in rows]


def _head_rows(lm: Lane, tokens: list[int]) -> Tensor:
    """The lm_head's weights of tokens, [n, width]."""
    weight = lm.lm_head_weight
    return weight[on_device(tokens, weight.device, torch.long)]


class CloverTree(ScoredTree):
    """A draft tree whose nodes carry the state of their path."""

    def __init__(self, lm: Lane, network: CloverNetwork, state: Tensor, tree: TokenTree):
        super().__init__(lm, tree)
        self.network, self._states = network, {ROOT: state}
        self._number, self._known = -1, state  # of the last head that ran, and its output
        for token in lm.tokens[lm.target.states.length:]:
            self._number += 1
            self._states[ROOT], self._known = network.step(self._number, self._states[ROOT], self._vectors([token]))

    def rows(self, nodes: list[int]) -> Tensor:
        if nodes == [ROOT]:
            return self.lm.read_out(self._known).log_softmax(-1)
        self._number += 1
        before = torch.cat([self._states[self.tree.parents[node]] for node in nodes])
        vectors = self._vectors([self.tree.tokens[node] for node in nodes])
        states, outputs = self.network.step(self._number, before, vectors)
        self._states |= zip(nodes, states.split(1))
        return self.lm.read_out(outputs).log_softmax(-1)

    def _vectors(self, tokens: list[int]) -> Tensor:
        return self.network.token_vectors(_head_rows(self.lm, tokens))

    def grow(self, depth: int, budget: int, rule: LevelRule) -> None:
        """Add levels of children by the rule, the most probable paths of the last one, until the budget is spent."""
        frontier = [ROOT]
        for _ in range(depth):
            found = [
                (parent, *child) for parent, row in zip(frontier, rule.children(self.rows(frontier))) for child in row
            ]
            scores = [logp + (self.scores[parent] if parent != ROOT else 0.0) for parent, logp, _ in found]
            best = sorted(range(len(found)), key=lambda place: (-scores[place], place))[:budget]
            added = [self.add_one(parent, token, logp) for parent, logp, token in map(found.__getitem__, sorted(best))]
            budget -= len(added)
            frontier = [node for node in added if not self.lm.ends(self.tree.tokens[node])]
            if not frontier or not budget:
                break


class CloverDrafter(DraftHead):
    """Heads in a chain, each of which reads the token that the one before it drafted."""

    nodes: int = knob(4, 0, 64, step=1, help="draft tokens in the tree; 0 is plain decoding")
    depth: int = knob(3, 1, 8, step=1, help="heads that are used, at most those that were trained")
    width: int = knob(10, 1, 20, step=1, help="most children of a node; 1 makes the tree a chain")
    top_p: float = knob(0.95, 0.0, 1.0, step=0.05, help="children are added until their probabilities add up to this")
    min_ratio: float = knob(0.25, 0.0, 1.0, step=0.05, help="smallest probability of a child, relative to the best")

    def __post_init__(self):
        super().__post_init__()
        self._rows: CommittedRows | None = None

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree, unread = TokenTree(self.name), lm.target.behind()
        depth = min(self.depth, budget, self.network.count + 1 - unread)
        if depth < 1 or not self.nodes:
            return tree
        if lm.lm_head_weight is None:
            raise Refusal(
                f"{self.title} reads the lm_head of {lm.target_model.name}, which is no plain matrix: load the model "
                "without quantisation.",
                self.name,
            )
        growing = CloverTree(lm, self.network, self._state(lm), tree)
        growing.grow(depth, self.nodes, LevelRule(self.width, self.top_p, self.min_ratio))
        yield paths_figure(growing, list(range(len(tree))), "by the heads")
        return tree

    def _state(self, lm: Lane) -> Tensor:
        """The augmented state [1, width] of the newest token that the target has read."""
        network = self.network
        self._rows = self._rows or CommittedRows(len(network.layers), network.ahead)

        def read(span: range, places: list[Place]) -> Tensor:
            states = lm.target.states.of(lm.depth, span.start)[:len(span)]
            following = _head_rows(lm, lm.tokens[span.start + 1:span.stop + 1])
            return network.augmented(states, network.token_vectors(following), places)

        return self._rows.catch_up(lm, read)


def begin_with(layer: DecoderLayer, weights: dict[str, Tensor]) -> None:
    """Start a layer with the weights of the target's last one, if it has the same parts and sizes."""
    own = layer.state_dict()
    if {name: tensor.shape for name, tensor in weights.items()} == {name: own[name].shape for name in own}:
        layer.load_state_dict(weights)
