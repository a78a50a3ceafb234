"""The networks of EAGLE: one decoder layer that continues the target's hidden states, fed with its own output.

Row i reads the state of token i and the embedding of token i + 1, and its output predicts the state of token i + 1.
Parameter names are those of the published heads. Li et al. 2024, arXiv 2401.15077; Li et al. 2025, arXiv 2503.01840.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, ModuleDict, ModuleList, RMSNorm

from playground.algorithms.draft_heads.head_layers import (
    EPS,
    THETA,
    DecoderLayer,
    GatedFeedForward,
    HeadShape,
    LayeredPlace,
    Place,
    SelfAttention,
)
from playground.engine.host_copies import on_device

FACTS = ("head_dim", "rope_theta", "rms_norm_eps", "norm_before_residual", "norm_output")  # numbers of a published head
Weights = dict[str, Tensor]
ReadOut = Callable[[Tensor], Tensor]  # logits [n, V] of inputs of the lm_head
Embed = Callable[[list[int]], Tensor]  # input embeddings [n, width] of tokens


class FeatureNetwork(Module):
    """An autoregressive draft head over hidden states."""

    layers_read = 1  # layers of the target whose states it reads

    def features(self, states: Tensor) -> Tensor:
        """What it continues, [..., width], of the target's states [..., layers_read * hidden_size]."""
        return states

    def embedded(self, tokens: list[int], embed: Embed) -> Tensor:
        """Embeddings [n, width] of tokens; `embed` gives the target's."""
        return embed(tokens)

    def forward(self, embeddings: Tensor, features: Tensor, place: LayeredPlace) -> Tensor:
        """The next features [..., width], of the next tokens' embeddings and features [..., width]."""
        raise NotImplementedError

    def read_out(self, features: Tensor, lm_head: ReadOut) -> Tensor:
        """Logits [n, draft vocabulary] of features [n, width]; `lm_head` is the target's."""
        return lm_head(features)

    def target_ids(self, tokens: Tensor) -> Tensor:
        """The target's ids of tokens of the draft vocabulary."""
        return tokens


class FeatureLayer(Module):
    """The decoder layer of EAGLE-1, which has no norm before its attention."""

    def __init__(self, shape: HeadShape, theta: float = THETA):
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(shape, theta=theta), GatedFeedForward(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, EPS)

    def forward(self, rows: Tensor, place: Place) -> Tensor:
        rows = rows + self.self_attn(rows, place)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class EagleNetwork(FeatureNetwork):
    """EAGLE-1 and EAGLE-2: continues the input of the target's lm_head."""

    def __init__(self, shape: HeadShape, bias: bool = True, theta: float = THETA):
        super().__init__()
        self.fc = Linear(2 * shape.width, shape.width, bias=bias)
        self.layers = ModuleList([FeatureLayer(shape, theta)])

    def forward(self, embeddings: Tensor, features: Tensor, place: Place) -> Tensor:
        rows = self.fc(torch.cat([embeddings, features], -1))
        for layer in self.layers:
            rows = layer(rows, place)
        return rows

    @classmethod
    def of(cls, weights: Weights) -> EagleNetwork:
        """The network with these weights. Raises KeyError or RuntimeError if they are of another network."""
        weights, facts = without_facts(weights)
        shape = shape_of(weights, "layers.0.", weights["fc.weight"].shape[0], facts.get("head_dim"))
        network = cls(shape, "fc.bias" in weights, facts.get("rope_theta", THETA))
        network.load_state_dict(weights)
        set_eps(network, facts.get("rms_norm_eps", EPS))
        return network


class Eagle3Layer(Module):
    """The decoder layer of EAGLE-3, whose attention reads the normed embedding beside the normed features."""

    def __init__(
        self, shape: HeadShape, theta: float = THETA, normed: bool = False, norm_before_residual: bool = False
    ):
        super().__init__()
        self.norm_before_residual, self.theta, self.normed = norm_before_residual, theta, normed
        self.self_attn, self.mlp = SelfAttention(shape, 2 * shape.width, theta, normed), GatedFeedForward(shape)
        self.input_layernorm = RMSNorm(shape.width, EPS)
        self.hidden_norm = RMSNorm(shape.width, EPS)
        self.post_attention_layernorm = RMSNorm(shape.width, EPS)

    def forward(self, embeddings: Tensor, features: Tensor, place: Place) -> Tensor:
        normed = self.hidden_norm(features)
        read = torch.cat([self.input_layernorm(embeddings), normed], -1)
        rows = (normed if self.norm_before_residual else features) + self.self_attn(read, place)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class Eagle3Network(FeatureNetwork):
    """EAGLE-3: continues a mixture of three of the target's hidden states, and reads out over a draft vocabulary.

    Without an lm_head of its own it reads out with the target's. `norms` counts the RMSNorms before the mixture: none,
    one over all states, or one for each layer that is read. With `norm_output` (EAGLE-3.1) the normed output is fed
    back. `add_layers` gives it further layers of the usual form.
    """

    layers_read = 3

    def __init__(
        self, shape: HeadShape, reads: int, draft_vocabulary: int = 0, norms: int = 0, norm_output: bool = False,
        **layer: float,
    ):
        super().__init__()
        self.fc, self.norm_output = Linear(reads, shape.width, bias=False), norm_output
        self.midlayer, self.norm = Eagle3Layer(shape, **layer), RMSNorm(shape.width, EPS)
        self.lm_head = Linear(shape.width, draft_vocabulary, bias=False) if draft_vocabulary else None
        self.register_buffer("d2t", torch.zeros(draft_vocabulary, dtype=torch.long) if draft_vocabulary else None)
        self.input_norm = RMSNorm(reads, EPS) if norms == 1 else None
        self.fc_norm = ModuleList(RMSNorm(reads // norms, EPS) for _ in range(norms)) if norms > 1 else None
        self.layers, self.embed_tokens = ModuleDict(), None

    def add_layers(self, shape: HeadShape, last: int) -> None:
        """Further layers after the first, up to this number."""
        first = self.midlayer
        self.layers.update({str(i): DecoderLayer(shape, first.theta, first.normed) for i in range(1, last + 1)})

    def add_embeddings(self, vocabulary: int) -> None:
        """Input embeddings of its own, in place of the target's."""
        self.embed_tokens = Embedding(vocabulary, self.fc.out_features)

    def embedded(self, tokens: list[int], embed: Embed) -> Tensor:
        if self.embed_tokens is None:
            return embed(tokens)
        return self.embed_tokens(on_device(tokens, self.embed_tokens.weight.device, torch.long))

    def features(self, states: Tensor) -> Tensor:
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], -1)
        return self.fc(states)

    def forward(self, embeddings: Tensor, features: Tensor, place: Place) -> Tensor:
        output = self.midlayer(embeddings, features, place)
        for number, layer in self.layers.items():
            output = layer(output, place.layer(int(number)))
        return self.norm(output) if self.norm_output else output

    def read_out(self, features: Tensor, lm_head: ReadOut) -> Tensor:
        return (self.lm_head or lm_head)(features if self.norm_output else self.norm(features))

    def target_ids(self, tokens: Tensor) -> Tensor:
        return tokens if self.d2t is None else tokens + self.d2t[tokens]

    @classmethod
    def of(cls, weights: Weights) -> Eagle3Network:
        """The network with these weights. Raises KeyError or RuntimeError if they are of another network."""
        weights, facts = without_facts(weights)
        width, reads = weights["fc.weight"].shape
        own = weights["lm_head.weight"].shape[0] if "lm_head.weight" in weights else 0
        shape = shape_of(weights, "midlayer.", width, facts.get("head_dim"))
        network = cls(
            shape, reads, own, sum("input_norm." in name or "fc_norm." in name for name in weights),
            bool(facts.get("norm_output", 0)), theta=facts.get("rope_theta", THETA),
            normed="midlayer.self_attn.q_norm.weight" in weights,
            norm_before_residual=bool(facts.get("norm_before_residual", 0)),
        )
        if own and "d2t" not in weights:
            weights["d2t"] = torch.zeros(own, dtype=torch.long)
        if (last := last_layer(weights)) > 0:
            network.add_layers(shape_of(weights, "layers.1.", width, facts.get("head_dim")), last)
        if "embed_tokens.weight" in weights:
            network.add_embeddings(len(weights["embed_tokens.weight"]))
        network.load_state_dict(weights)
        set_eps(network, facts.get("rms_norm_eps", EPS))
        return network


def without_facts(weights: Weights) -> tuple[Weights, dict[str, float]]:
    """The weights of the network, and what published heads say besides."""
    facts = {name: float(weights[name]) for name in FACTS if name in weights}
    return {name: tensor for name, tensor in weights.items() if name not in (*FACTS, "layers")}, facts


def last_layer(weights: Weights) -> int:
    """The number of the last of the layers that are numbered, -1 if none is. Raises ValueError if some are left out."""
    numbers = {int(name.split(".")[1]) for name in weights if name.startswith("layers.")}
    last = max(numbers, default=-1)
    if last > len(numbers):
        raise ValueError("numbers of layers that have no weights")
    return last


def early_middle_late(depth: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads of a target with so many layers, where a head does not say."""
    return tuple(min(depth - 1, max(0, layer)) for layer in (2, depth // 2, depth - 3))


def set_eps(network: Module, eps: float) -> None:
    """Set the epsilon of all norms."""
    for module in network.modules():
        if isinstance(module, RMSNorm):
            module.eps = eps


def shape_of(weights: Weights, layer: str, width: int, head_dim: float | None = None) -> HeadShape:
    """Sizes of a head, from the weights of its layer."""
    shape = shape_of_attention(weights, layer, width, head_dim)
    return shape._replace(inner=weights[f"{layer}mlp.up_proj.weight"].shape[0])


def shape_of_attention(weights: Weights, layer: str, width: int, head_dim: float | None = None) -> HeadShape:
    """Sizes of an attention, from its weights."""
    query, key = (weights[f"{layer}self_attn.{name}_proj.weight"].shape[0] for name in "qk")
    shape = HeadShape.like(width)
    head_dim = int(head_dim or shape.head_dim)
    return shape._replace(heads=query // head_dim, kv_heads=key // head_dim, head_dim=head_dim)


class UnrolledTexts:
    """Whole texts whose head reads its own output for the `step`-th time, as it will while it drafts.

    Row i is then `step` tokens further on. It attends to the rows of the first time up to i, which read the
    target's states, and to the rows i of later times. Positions are counted along that path.
    """

    def __init__(self, earlier: UnrolledTexts | None, rows: int):
        self.past: list[tuple[Tensor, Tensor]] = earlier.past if earlier else []
        self.positions = torch.arange(rows) + len(self.past)
        self._earlier, self._further = earlier, {}

    def layer(self, number: int) -> UnrolledTexts:
        """The same rows in another layer."""
        if number and number not in self._further:
            before = self._earlier and self._earlier.layer(number)
            self._further[number] = UnrolledTexts(before, len(self.positions))
        return self._further[number] if number else self

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of [texts, heads, rows, d]; remembers the key and value states for later times."""
        groups = query.shape[1] // keys.shape[1]
        keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
        self.past.append((keys, values))
        (first_keys, first_values), later = self.past[0], self.past[1:]
        scores = query @ first_keys.transpose(-1, -2) * query.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        own = [(query * keys).sum(-1, keepdim=True) * query.shape[-1] ** -0.5 for keys, _ in later]
        weights = torch.cat([scores.masked_fill(future, float("-inf")), *own], -1).softmax(-1)
        attended = weights[..., :scores.shape[-1]] @ first_values
        for column, (_, values) in enumerate(later, scores.shape[-1]):
            attended = attended + weights[..., column:column + 1] * values
        return attended


def soft_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Mean cross-entropy of logits [n, V] with the target's distributions [n, V]; 0 for none."""
    return -(teacher * logits.log_softmax(-1)).sum(-1).mean() if len(logits) else logits.sum() * 0

