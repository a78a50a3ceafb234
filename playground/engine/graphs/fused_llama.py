"""Fused forward of models of the Llama family, because a small model spends most of its time between matrix products.

The library's modules make some forty small calls per layer. Here the same weights take about twenty: query, key and
value projections are one product, gate and up projections another, and the rotary embedding is three operations on a
table. The logits equal the library's up to rounding, which is checked for every model when it is loaded. Layer plans,
KV caches and masks are those of the hooks. If the layers are on several devices, the hidden states move between them.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from playground.engine.attention.attention_parts import Projections
from playground.engine.attention.segment_attention import attend_all
from playground.engine.attention.some_rows import attend_some, received_attention, store_all
from playground.engine.graphs.fused_parts import FeedForward, FusedLinear, RMSNorm
from playground.engine.hooks import Call
from playground.engine.layer_choices import ComputePass, FeedForwardPart, LayerChoices, attending_rows
from playground.engine.loading.stored_weights import is_quantised
from playground.errors import Refusal

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
DEVICES, DTYPES = ("cpu", "cuda", "mps"), (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LINEARS = ("qkv", "out", "gate_up", "down")  # of a layer
REORDER_UP_TO = 2 ** 26  # weights of a network; a second copy in oneDNN's layout is made up to this size
NARROWED = 64  # feed-forward networks with some of their channels that a small network keeps
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # angles do not depend on the length of the text


class FusedLayer:
    """One decoder layer over hidden states [n, d]."""

    def __init__(self, layer: nn.Module, index: int):
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.scaling, self.head_dim = index, attention.scaling, attention.head_dim
        self.window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        self.input_norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv = FusedLinear.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = FusedLinear.of(attention.o_proj)
        self.ffn = FeedForward(FusedLinear.of(mlp.gate_proj, mlp.up_proj), FusedLinear.of(mlp.down_proj))
        self.linears = [self.qkv, self.out, self.ffn.gate_up, self.ffn.down]
        self.head_norms = [_norm(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self.device = self.qkv.weight.device

    def with_matrices(self, matrices: Mapping[str, Tensor]) -> FusedLayer:
        """A layer with those of the matrices that are its own (`FusedLlama.with_matrices`)."""
        other = copy(self)
        new = [linear.replaced(matrices.get(f"{name}.{self.index}")) for name, linear in zip(LINEARS, self.linears)]
        other.qkv, other.out, other.ffn, other.linears = new[0], new[1], FeedForward(*new[2:]), new
        return other

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, call: Call) -> Tensor:
        hidden = hidden + self.out(self._attention(self.input_norm(hidden), cos, sin, call))
        return hidden + self.ffn(self.mlp_norm(hidden))

    def choose(self, hidden: Tensor, cos: Tensor, sin: Tensor, call: Call, compute: ComputePass) -> Tensor:
        """The layer under a compute policy: attention and feed-forward networks only where they run."""
        attention, spent = self.qkv.weight.numel() + self.out.weight.numel(), [0.0] * len(hidden)
        attending = attending_rows(compute.choices.attends(self.index, hidden), len(hidden))
        storing = len(attending) < len(hidden) and compute.choices.stores(self.index, hidden)
        if storing:
            hidden, spent = self._attend_beside_stored(hidden, attending, (cos, sin), call)
        else:
            hidden = self._attend_rows(hidden, attending, (cos, sin), call, compute.choices)
        # weights that are read are computed a second time, which is half of what attention computes
        computed = len(attending) * (1.5 if compute.choices.reads_attention(self.index) else 1.0)
        if storing and attending:
            computed = len(hidden)
        compute.idle_attention += 1 - computed / len(hidden)
        for row in attending:
            spent[row] = attention
        after = hidden
        for rows, part in compute.choices.feed_forwards(self.index, hidden, self.ffn):
            after = self._add(after, hidden, rows, part)
            for row in range(len(hidden)) if rows is None else rows:
                spent[row] += part.weights
        deciding = compute.choices.deciding_weights(self.index)
        compute.note(attention + self.ffn.weights, [each + deciding for each in spent])
        compute.choices.observe(self.index, hidden, after)
        return after

    def _attend_beside_stored(
        self, hidden: Tensor, rows: list[int], angles: tuple[Tensor, Tensor], call: Call
    ) -> tuple[Tensor, list[float]]:
        """The hidden states after attention that runs for some rows while the others leave their keys and values.

        And the weights that each row was multiplied with. Later rows see these keys in the same forward, so all rows
        go through one attention, of which only that of `rows` is projected and added.
        """
        normed = self.input_norm(hidden)
        if not rows:
            return hidden, [float(self._store(normed, *angles, call))] * len(hidden)
        mixed = attend_all(self.index, self._states(normed, *angles), call, self.scaling, self.window)
        index = torch.tensor(rows, device=hidden.device)
        added = self.out(mixed.transpose(0, 1).reshape(len(hidden), -1)[index])
        return hidden.index_add(0, index, added), [float(self.qkv.weight.numel())] * len(hidden)

    def _attend_rows(
        self, hidden: Tensor, rows: list[int], angles: tuple[Tensor, Tensor], call: Call, choices: LayerChoices
    ) -> Tensor:
        """The hidden states after attention that runs for some rows, or for none."""
        if not rows:
            return hidden
        whole = len(rows) == len(hidden)
        index = None if whole else torch.tensor(rows, device=hidden.device)
        inputs, (cos, sin) = (hidden, angles) if whole else (hidden[index], (table[index] for table in angles))
        new = self._states(self.input_norm(inputs), cos, sin)
        if whole:
            mixed = attend_all(self.index, new, call, self.scaling, self.window)
        else:
            mixed = attend_some(self.index, rows, new, call, self.scaling, self.window)
        if choices.reads_attention(self.index):
            weights = received_attention(self.index, rows, new[0], call, self.scaling, self.window)
            choices.attended(self.index, weights)
        added = self.out(choices.mixed(self.index, mixed.transpose(0, 1).reshape(len(rows), -1)))
        return hidden + added if whole else hidden.index_add(0, index, added)

    def _add(self, sums: Tensor, hidden: Tensor, rows: list[int] | None, part: FeedForwardPart) -> Tensor:
        """Add what a feed-forward network computes for some rows."""
        if rows is None or len(rows) == len(hidden):
            return sums + part(self.mlp_norm(hidden))
        index = torch.tensor(rows, device=hidden.device)
        return sums.index_add(0, index, part(self.mlp_norm(hidden[index])))

    def _store(self, hidden: Tensor, cos: Tensor, sin: Tensor, call: Call) -> int:
        """Write the key and value states of rows that do not attend; returns how many weights that takes."""
        first = self.heads * self.head_dim
        project = FusedLinear(self.qkv.weight[first:], None if self.qkv.bias is None else self.qkv.bias[first:])
        states = project(hidden).view(hidden.shape[0], -1, self.head_dim).transpose(0, 1)
        keys, values = states.split(self.kv_heads)
        if self.head_norms:
            keys = self.head_norms[1](keys)
        keys = torch.addcmul(keys * cos, keys.roll(self.head_dim // 2, -1), sin)
        store_all(self.index, keys, values, call)
        return project.weight.numel()

    def _attention(self, hidden: Tensor, cos: Tensor, sin: Tensor, call: Call) -> Tensor:
        out = attend_all(self.index, self._states(hidden, cos, sin), call, self.scaling, self.window)
        return out.transpose(0, 1).reshape(hidden.shape[0], -1)

    def _states(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value states after the rotary embedding, [heads or kv_heads, n, d]."""
        qkv = self.qkv(hidden).view(hidden.shape[0], -1, self.head_dim).transpose(0, 1)  # [heads + 2 kv_heads, n, d]
        qk, values = qkv[:-self.kv_heads], qkv[-self.kv_heads:]
        if self.head_norms:
            query_norm, key_norm = self.head_norms
            qk = torch.cat([query_norm(qk[:self.heads]), key_norm(qk[self.heads:])])
        rotated = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        return rotated[:self.heads], rotated[self.heads:], values


class FusedLlama:
    """The whole network: token ids or embeddings in, logits out."""

    def __init__(self, network: PreTrainedModel, context: int):
        inner = network.model
        self.embeddings, self.head = inner.embed_tokens.weight, FusedLinear.of(network.lm_head)
        self.layers = [FusedLayer(layer, index) for index, layer in enumerate(inner.layers)]
        self.heads, self.head_dim = int(self.layers[0].heads), int(self.layers[0].head_dim)
        self.norm = _norm(inner.norm)
        self.cos, self.sin = _angles(inner.rotary_emb, context, self.embeddings)
        self.device = self.embeddings.device
        # whether the layers are on several devices, between which the hidden states move
        self.spread = len({weight.device for weight in network.parameters()}) > 1
        self.bytes = sum(weight.nbytes for weight in network.parameters())
        self.weights = sum(weight.numel() for weight in network.parameters())
        # parts of a small network are kept for the next lane: copying them takes longer than a short answer
        kept = NARROWED if self.weights <= REORDER_UP_TO else 0
        self._narrowed = lru_cache(maxsize=kept)(self._narrow)
        if self.weights <= REORDER_UP_TO:
            for linear_layer in (self.head, *(each for layer in self.layers for each in layer.linears)):
                linear_layer.reorder()

    def with_matrices(self, matrices: Mapping[str, Tensor]) -> FusedLlama:
        """A network that shares everything with this one but these matrices.

        They are named "embeddings", "head", or by projection and layer: "qkv.3", "out.3", "gate_up.3" and "down.3".
        """
        other = copy(self)
        other.embeddings = matrices.get("embeddings", self.embeddings).to(self.embeddings)
        other.head = self.head.replaced(matrices.get("head"))
        other.layers = [layer.with_matrices(matrices) for layer in self.layers]
        return other

    def at_positions(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Query or key states [heads, n, d] with the rotary embedding at positions [n]."""
        cos, sin = self._angles_at(positions, rows)
        return torch.addcmul(rows * cos, rows.roll(rows.shape[-1] // 2, -1), sin)

    def _angles_at(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions [n] on the device of `like`, [n, d] each."""
        at = positions.to(self.device)
        return self.cos[at].to(like.device), self.sin[at].to(like.device)

    def rotate_back(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Query or key states [heads, n, d] rotated back by so many positions [n]."""
        # some tables are scaled by a constant (YaRN); the states have that factor already
        cos, sin = self._unscaled_at(positions, rows)
        return torch.addcmul(rows * cos, rows.roll(rows.shape[-1] // 2, -1), -sin)

    def rotate(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Query or key states [heads, n, d] rotated by so many positions [n]; undoes `rotate_back`."""
        cos, sin = self._unscaled_at(positions, rows)
        return torch.addcmul(rows * cos, rows.roll(rows.shape[-1] // 2, -1), sin)

    def _unscaled_at(self, positions: Tensor, like: Tensor) -> Iterator[Tensor]:
        return (table / self.cos[0, 0].to(table.device) for table in self._angles_at(positions, like))

    def __call__(
        self,
        positions: Tensor,
        wanted: Tensor | int,
        call: Call,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Logits [rows, V] of the wanted rows, an index tensor or 0 for all.

        positions and input_ids are [1, rows], inputs_embeds [1, rows, d].
        """
        hidden = embedding(input_ids[0], self.embeddings) if inputs_embeds is None else inputs_embeds[0]
        cos, sin = self.cos[positions[0]], self.sin[positions[0]]
        if call.plan.is_plain and not self.spread:
            for layer in self.layers:
                hidden = layer(hidden, cos, sin, call)
        else:
            hidden = self._planned(hidden, cos, sin, call)
        return self._head(hidden if isinstance(wanted, int) else hidden[wanted.to(hidden.device)])

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states; what they need may be on several devices."""
        if not self.spread:
            return self.head(self.norm(hidden))
        normed = self.norm(hidden.to(self.norm.weight.device))
        return self.head(normed.to(self.head.weight.device)).to(self.device)

    def _planned(self, hidden: Tensor, cos: Tensor, sin: Tensor, call: Call) -> Tensor:
        """Run the layers of the plan, capturing hidden states."""
        compute = call.plan.compute
        for layer in self.layers:
            hidden = call.enter(layer.index, hidden)
            if self.spread:
                hidden, cos, sin = (states.to(layer.device) for states in (hidden, cos, sin))
            if compute:
                hidden = layer.choose(hidden, cos, sin, call, compute)
            elif call.plan.runs(layer.index):
                hidden = layer(hidden, cos, sin, call)
        return call.enter(len(self.layers), hidden)

    # --- what a cache policy computes with ---

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normalised before the rotary embedding."""
        return any(layer.head_norms for layer in self.layers)

    def attention_projections(self, layer: int) -> Projections:
        """The weights of the attention of a layer."""
        part = self.layers[layer]
        sizes = [count * part.head_dim for count in (part.heads, part.kv_heads, part.kv_heads)]
        return Projections(*part.qkv.weight.split(sizes), part.out.weight)

    def attention_input(self, layer: int, hidden: Tensor) -> Tensor:
        """What the projections of a layer multiply, [n, width], from the layer's input [n, width]."""
        return self.layers[layer].input_norm(hidden.to(self.layers[layer].device))

    # --- what a compute policy selects from ---

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def width(self) -> int:
        return self.embeddings.shape[1]

    def channels(self, layer: int) -> int:
        """Width of the feed-forward network of a layer, between its projections."""
        return self.layers[layer].ffn.channels

    def output_norms(self, layer: int) -> Tensor:
        """Norm of the output weights of each channel, [k]."""
        return self.layers[layer].ffn.down.weight.norm(dim=0)

    def ffn_projections(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of a layer's feed-forward network, gate, up [k, d] and down [d, k]; Refusal if it has biases."""
        ffn = self.layers[layer].ffn
        if ffn.gate_up.bias is not None or ffn.down.bias is not None:
            raise Refusal(
                "The feed-forward networks of this model have biases, which belong to no part of them: choose another "
                "model, or another compute policy.",
                "model",
            )
        return *ffn.gate_up.weight.chunk(2), ffn.down.weight

    def ffn_input(self, layer: int, hidden: Tensor) -> Tensor:
        """What the feed-forward network of a layer reads of the hidden states [n, d] after attention: their norm."""
        return self.layers[layer].mlp_norm(hidden.to(self.layers[layer].device))

    def narrowed(self, layer: int, channels: Tensor) -> FeedForward:
        """The feed-forward network of a layer with only these channels [k]."""
        return self._narrowed(layer, tuple(channels.tolist()))

    def _narrow(self, layer: int, channels: tuple[int, ...]) -> FeedForward:
        index = torch.tensor(channels, dtype=torch.long, device=self.layers[layer].device)
        return self._reordered(self.layers[layer].ffn.narrowed(index))

    def feed_forward(self, layer: int, gate: Tensor, up: Tensor, down: Tensor) -> FeedForward:
        """Another feed-forward network for the hidden states of a layer, from weights [k, d], [k, d] and [d, k]."""
        like = self.layers[layer].ffn.down.weight
        gate_up, down = torch.cat([gate, up]).to(like), down.to(like)
        return self._reordered(FeedForward(FusedLinear(gate_up, None), FusedLinear(down, None)))

    def norm_before(self, layer: int) -> tuple[Tensor, float]:
        """Weight [d] and epsilon of the norm before the feed-forward network of a layer, or before the lm_head."""
        norm = self.norm if layer == self.depth else self.layers[layer].mlp_norm
        return norm.weight, norm.epsilon

    @property
    def lm_head(self) -> Tensor:
        """Weights of the lm_head, [V, d]."""
        return self.head.weight

    def _reordered(self, part: FeedForward) -> FeedForward:
        if self.weights <= REORDER_UP_TO:
            part.gate_up.reorder()
            part.down.reorder()
        return part


def build_fused_llama(network: PreTrainedModel, context: int) -> FusedLlama | None:
    """The fused forward of a network; None for other model types, quantised weights, other devices or dtypes."""
    config, weight = network.config, network.get_input_embeddings().weight
    supported = (
        all(weight.device.type in DEVICES for weight in network.parameters())
        and len({weight.device.type for weight in network.parameters()}) == 1
        and weight.dtype in DTYPES
    )
    if config.model_type not in MODEL_TYPES or not supported or is_quantised(network) or not _is_standard(network):
        return None
    return FusedLlama(network, context)


def _is_standard(network: PreTrainedModel) -> bool:
    """Whether rotary embedding, linear layers and activations are of the types the fused forward assumes."""
    inner = network.model
    static = getattr(inner.rotary_emb, "rope_type", "") in STATIC_ROPE
    linears = [module for name, module in network.named_modules() if name.endswith(("_proj", "lm_head"))]
    activations = {type(layer.mlp.act_fn) for layer in inner.layers}
    return static and all(type(module) is nn.Linear for module in linears) and activations == {type(_silu())}


def _silu() -> nn.Module:
    from transformers.activations import ACT2FN
    return ACT2FN["silu"]


def _norm(module: nn.Module) -> RMSNorm:
    return RMSNorm(module.weight, module.variance_epsilon)


def _angles(rotary: nn.Module, context: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [context, d].

    The first half of the sines is negated, so that a rotation needs only products and a swap of halves.
    """
    tables = rotary(like[None, :1], torch.arange(context, device=like.device)[None])
    cos, sin = (table[0].to(like.device) for table in tables)  # the module may be on another device
    return cos.contiguous(), torch.cat([-sin[:, :sin.shape[1] // 2], sin[:, sin.shape[1] // 2:]], -1)
