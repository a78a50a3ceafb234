"""LongSpec: a drafter of one layer with constant memory, which reads the target's own KV cache."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import exp
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, RMSNorm
from torch.nn.functional import scaled_dot_product_attention

from playground.algorithms.draft_heads.draft_head import DraftHead, Weights
from playground.algorithms.draft_heads.feature_networks import EPS, shape_of
from playground.algorithms.draft_heads.head_layers import GatedFeedForward, HeadShape, Place, SelfAttention, rotated
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
from playground.algorithms.draft_heads.window_attention import LastToken, TreeRows, WindowCache, WindowedTexts
from playground.contract import Lane, knob
from playground.contract.token_tree import ROOT, TokenTree
from playground.engine.host_copies import on_device, read_lists
from playground.errors import Refusal
from playground.events import Figure

WINDOW = 64  # tokens of the drafter's window in a training
MOST_LAG = 4  # newest tokens whose target states a row has to do without in a training
MOST_ANCHORS = 4  # first tokens that keep their positions when those of all others are shifted

Attend = Callable[[Tensor], Tensor]
"""Attention of query states [..., heads, n, head_dim] over the target's cache."""


class BiasedAttention(SelfAttention):
    """Self-attention whose projections of queries, keys and values have a bias."""

    def __init__(self, shape: HeadShape):
        super().__init__(shape)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, Linear(shape.width, getattr(self, name).out_features))


class CrossAttention(Module):
    """Attention over the target's key and value states: only queries and the output are projected."""

    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = Linear(width, heads * head_dim)
        self.o_proj = Linear(heads * head_dim, width, bias=False)

    def forward(self, rows: Tensor, attend: Attend) -> Tensor:
        query = self.q_proj(rows).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
        return self.o_proj(attend(query).transpose(-3, -2).flatten(-2))


class GlideLayer(Module):
    """The drafter: from token embeddings to inputs of the target's lm_head, without a final norm."""

    def __init__(self, shape: HeadShape, heads: int, head_dim: int):
        super().__init__()
        self.self_attn, self.mlp = BiasedAttention(shape), GatedFeedForward(shape)
        self.cross_attn = CrossAttention(shape.width, heads, head_dim)
        self.input_layernorm = RMSNorm(shape.width, EPS)
        self.post_self_attention_layernorm = RMSNorm(shape.width, EPS)
        self.post_cross_attention_layernorm = RMSNorm(shape.width, EPS)

    def forward(self, rows: Tensor, place: Place, attend: Attend | None) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), place)
        if attend is not None:
            rows = rows + self.cross_attn(self.post_self_attention_layernorm(rows), attend)
        return rows + self.mlp(self.post_cross_attention_layernorm(rows))

    def states(self, embeddings: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value states [kv_heads, n, d] of the self-attention; they depend on the tokens alone."""
        return self.self_attn.states(self.input_layernorm(embeddings), positions)[1:]


class LongSpec(DraftHead):
    """A drafter of one layer with a window over the last tokens, which reads everything before through the target's
    keys and values.

    Its own memory does not grow with the text. Its cross-attention reads the last layer of the target's KV cache, which
    is there anyway, so no hidden state is passed on and a draft token's input is its embedding. Its queries get the
    target's rotary embedding if the target is of the Llama family, and none otherwise. On each level of the draft tree
    the most probable paths of all are kept; the paper's shape is first = 4, width = 16, depth = 5. Attention over
    window and tree is computed apart and merged exactly. During the training positions are shifted at random, so that
    it has met large ones. first = width = 1 drafts a chain; depth = 0 is plain decoding. Yang et al. 2025, arXiv
    2502.17421.
    """

    name, title, paper, sheet = "longspec", "LongSpec", "2502.17421", "draft-heads/longspec"
    guarantee, reads_keys = ("collapses",), True

    depth: int = knob(4, 0, 6, step=1, help="levels of the draft tree; 0 is plain decoding")
    first: int = knob(4, 1, 16, step=1, help="draft tokens on the first level")
    width: int = knob(6, 1, 16, step=1, help="draft tokens on each further level, of all paths")
    window: int = knob(WINDOW, 16, 512, step=1, help="newest tokens that the drafter itself attends to")
    cross: bool = knob(True, help="attend to the target's keys and values; without, it sees its window only")

    def __post_init__(self):
        super().__post_init__()
        self._cache = WindowCache(self.window)
        self._target: Any = None  # the target's last layer, in this round

    def state_layers(self, depth):
        return ()

    def check_target(self, model):
        if getattr(model, "recurrence", None):
            raise Refusal(
                f"{self.title} reads the keys of the last layer, and layers of {model.name} are recurrent: choose "
                "another drafter, or a model with attention in every layer.",
                self.name,
            )

    @classmethod
    def untrained(cls, width, depth):
        shape = HeadShape.like(width)
        return starting_weights(width, shape.heads, shape.head_dim)

    def beginning(self, lm: Lane):
        keys = lm.target.last_cache().keys
        return starting_weights(lm.target_model.width, keys.shape[0], keys.shape[2])

    @classmethod
    def build(cls, weights):
        own = {name: tensor for name, tensor in weights.items() if name != "cross_head_dim"}
        width, head_dim = weights["cross_attn.q_proj.weight"].shape[1], int(weights["cross_head_dim"])
        network = GlideLayer(shape_of(own, "", width), len(own["cross_attn.q_proj.weight"]) // head_dim, head_dim)
        network.load_state_dict(own)
        return network

    @classmethod
    def train(cls, texts: HeadTexts) -> Iterator:
        """Train the layer on the texts at shifted positions; returns the weights."""
        torch.manual_seed(texts.seed)
        nothing = torch.zeros(1, 1, dtype=torch.long)
        head_dim = texts.frozen.last_cache(nothing, nothing)[0].shape[-1]
        network = GlideLayer(HeadShape.like(texts.width), texts.frozen.heads, head_dim)

        def losses(batch: HeadBatch) -> list[Tensor]:
            (places, labels), found = ahead(batch, 1), read_texts(network, texts, batch)
            return [token_loss(found[places], texts.lm_head, labels[places])]

        yield from trained(network, texts, losses, HeadTraining(epochs=6, rate=2e-3, warmup=0.1, decay=0.1))
        counts = RankCounts(1, 10)
        with torch.no_grad():
            for batch in texts.held_out():
                places, labels = ahead(batch, 1)
                found = read_texts(network, texts, batch)
                counts.add(0, ranks(found[places], texts.lm_head, labels[places]))
        yield counts.note()
        return {**network.state_dict(), "cross_head_dim": torch.tensor(head_dim)}

    @torch.inference_mode()
    def drafted(self, lm: Lane, budget) -> Iterator:
        tree, levels = TokenTree(self.name), min(self.depth, budget)
        if levels < 1:
            return tree
        self._target = lm.target.last_cache()
        self._check_heads(lm)
        self._cache.follow(lm.tokens, partial(self._project, lm), lm.target_model.device)
        scores = self._grown(lm, tree, levels)
        yield self._figure(lm, tree, scores)
        yield self._sizes(lm)
        return tree

    def _project(self, lm: Lane, tokens: list[int], positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.network.states(lm.embed(tokens), positions)

    def _check_heads(self, lm: Lane) -> None:
        """Raise Refusal if the drafter was made for key states of another size."""
        found, needed = self.network.cross_attn.head_dim, self._target.keys.shape[2]
        if self._target.values.shape[2] != needed:
            raise Refusal(
                f"Keys and values of {lm.target_model.name} have different sizes, {needed} and "
                f"{self._target.values.shape[2]}, which {self.title} cannot read: choose another drafter.",
                self.name,
            )
        if found != needed:
            raise Refusal(
                f"This LongSpec drafter reads keys of size {found}, and those of {lm.target_model.name} have {needed}: "
                "choose a drafter for this model.",
                "weights",
            )

    def _grown(self, lm: Lane, tree: TokenTree, levels: int) -> list[float]:
        """Grow the tree; returns the log-probability of each path."""
        last, rows, scores = LastToken(self._cache), TreeRows(self._cache), []
        hidden = self.network(lm.embed(lm.tokens[-1:]), last, self._cross(lm, last))
        frontier, before, columns = [ROOT], [0.0], {ROOT: []}
        for level in range(levels):
            logp = lm.read_out(hidden).log_softmax(-1)
            chosen = best_continuations(logp, before, self.width if level else self.first)
            nodes = [
                tree.add(token, frontier[row], confidence=exp(score - before[row])) for row, token, score in chosen
            ]
            scores += [score for _, _, score in chosen]
            frontier = [node for node in nodes if not lm.ends(tree.tokens[node])]
            if not frontier or level == levels - 1:
                break
            before = [scores[node] for node in frontier]
            hidden = self._read(lm, tree, frontier, rows, columns)
        return scores

    def _read(
        self, lm: Lane, tree: TokenTree, nodes: list[int], rows: TreeRows, columns: dict[int, list[int]]
    ) -> Tensor:
        """Inputs of the lm_head [nodes, width] after nodes of one level."""
        first = rows.nodes
        seen = torch.zeros(len(nodes), first + len(nodes), dtype=torch.bool)
        for row, node in enumerate(nodes):
            columns[node] = [*columns[tree.parents[node]], first + row]
            seen[row, columns[node]] = True
        device = lm.target_model.device
        at = len(lm.tokens) - 1 + len(columns[nodes[0]])
        rows.place(torch.full((len(nodes),), at, device=device), seen)
        return self.network(lm.embed([tree.tokens[node] for node in nodes]), rows, self._cross(lm, rows))

    def _cross(self, lm: Lane, place: Place) -> Attend | None:
        """Attention over the target's last layer, of all tokens that it has read."""
        keys, values, live = self._target
        if not self.cross:
            return None

        def attend(query: Tensor) -> Tensor:
            rotate, seen = lm.target_model.rotate, None
            query = query if rotate is None else rotate(query, place.positions)
            if live is not None:
                seen = live.expand(len(keys), -1).repeat_interleave(len(query) // len(keys), 0)[:, None]
            return scaled_dot_product_attention(query[None], keys[None], values[None], seen, enable_gqa=True)[0]

        return attend

    def _figure(self, lm: Lane, tree: TokenTree, scores: list[float]) -> Figure:
        labels = ["text so far", *map(lm.piece, tree.tokens)]
        data = {"labels": labels, "parents": [-1, *(p + 1 for p in tree.parents)], "values": [1.0, *map(exp, scores)]}
        return Figure("tree", "probability of the path to each draft token, by the drafter", data)

    def _sizes(self, lm: Lane) -> Figure:
        series = {"drafter": float(len(self._cache.tokens)), "target": float(self._target.keys.shape[1])}
        return Figure("scalar", "tokens in the KV cache", {"x": lm.generated, "series": series})


def starting_weights(width: int, heads: int, head_dim: int) -> Weights:
    """Weights to start from, for a target with so many heads of this size."""
    return {
        **GlideLayer(HeadShape.like(width), heads, head_dim).state_dict(),
        "cross_head_dim": torch.tensor(head_dim),
    }


def best_continuations(chances: Tensor, before: list[float], count: int) -> list[tuple[int, int, float]]:
    """The `count` most probable paths, as (row, token, log-probability): `chances` [rows, V] continue paths of
    log-probabilities `before`.
    """
    total = chances + on_device(before, chances.device, chances.dtype)[:, None]
    values, places = read_lists(*total.flatten().topk(min(count, total.numel())))
    vocabulary = chances.shape[1]
    return [(at // vocabulary, at % vocabulary, value) for at, value in zip(places, values)]


def read_texts(network: GlideLayer, texts: HeadTexts, batch: HeadBatch) -> Tensor:
    """Inputs of the lm_head [texts, tokens, width] after each token, as while it drafts: a row sees the target's states
    up to a random number of tokens before it.
    """
    chance, count = batch.chance or torch.Generator().manual_seed(0), batch.ids.shape[1]
    positions = anchored_positions(count, texts.context, chance)
    keys, values = texts.frozen.last_cache(batch.ids, positions[None])
    cos, sin = texts.frozen.angles(positions)
    seen = torch.ones(count, count, dtype=torch.bool).tril(-_random(1, MOST_LAG, chance))
    some = seen.any(1)
    seen[~some, 0] = True  # so that the softmax is defined; what they attend to is set to zero

    def attend(query: Tensor) -> Tensor:
        found = scaled_dot_product_attention(rotated(query, cos, sin), keys, values, seen, enable_gqa=True)
        return found * some[:, None]

    return network(embedded(texts, batch.ids), WindowedTexts(positions, WINDOW), attend)


def anchored_positions(count: int, context: int, chance: torch.Generator) -> Tensor:
    """Positions [count] of a text: the first few keep theirs, all others are shifted by a random offset."""
    anchors, offset = _random(0, MOST_ANCHORS, chance), _random(0, max(0, context - count), chance)
    positions = torch.arange(count)
    return torch.where(positions < anchors, positions, positions + offset)


def _random(low: int, high: int, chance: torch.Generator) -> int:
    """A random integer, both ends included."""
    return int(torch.randint(low, high + 1, (), generator=chance))
