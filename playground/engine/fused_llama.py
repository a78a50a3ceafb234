"""A lean way through models of the Llama kind, for a small model spends most of its time between its products.

The library's modules make some forty small calls a layer. Here the same weights go through about twenty: queries, keys
and values are one product, gate and up another, a rotation is three operations over a table. The rows are the library's
own up to rounding, which every model is held to when it is loaded; plans, stores and masks are those of the seams.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu
from transformers import PreTrainedModel

from playground.engine.hooks import Call, attend_all

KINDS = ("llama", "mistral", "qwen2", "qwen3")
DEVICES, DTYPES = ("cpu", "cuda"), (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# weights of a product from which on oneDNN is worth the milliseconds it takes to make itself ready for a number of rows
LARGE = 2 ** 16
SMALL = 2 ** 26  # weights of a network up to which they are held a second time, as oneDNN reads them
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # angles that do not depend on how long the text has become


class Norm:
    """The root mean square norm of rows, in half the calls of torch's own: squares are summed and not averaged, so the
    weight bears the difference.
    """

    def __init__(self, weight: Tensor, epsilon: float):
        self.weight, self.epsilon = weight, epsilon
        self._grown = weight * weight.shape[0] ** 0.5
        self._least = torch.tensor(epsilon, dtype=weight.dtype)
        # a GPU's is one call; squares of short numbers need longer ones
        self._whole = weight.is_cuda or weight.dtype in (torch.float16, torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:  # the library norms in float32 whatever the weights are
            return self.weight * rms_norm(x.float(), self.weight.shape, None, self.epsilon).double()
        if self._whole:
            return rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return (x * self._grown).mul_(torch.addcmul(self._least, x, x).sum(-1, keepdim=True).rsqrt_())


@dataclass
class Product:
    """Several linear layers over the same rows as one.

    On a processor a large one goes through oneDNN, which uses the widest instructions of every maker's. Once it is
    packed, four rows take hardly longer than one, and one takes less than in torch's own product.
    """

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *layers: nn.Linear) -> Product:
        """Their weights become views into one tensor, so nothing is held twice."""
        weight = torch.cat([layer.weight.data for layer in layers]) if len(layers) > 1 else layers[0].weight.data
        for layer, part in zip(layers, weight.split([layer.out_features for layer in layers])):
            layer.weight.data = part
        biases = [layer.bias for layer in layers]
        return cls(weight, torch.cat([bias.data for bias in biases]) if biases[0] is not None else None)

    def __post_init__(self) -> None:
        self._read = self.weight

    def pack(self) -> None:
        """Hold the weights a second time, in the order oneDNN reads them in; they must not change from now on."""
        if self._by_onednn:
            # rows to reckon with; other numbers are served as well
            self._read = torch.ops.mkldnn._reorder_linear_weight(self.weight, 16)

    def __call__(self, x: Tensor) -> Tensor:
        if self._by_onednn:
            return torch.ops.mkldnn._linear_pointwise(x, self._read, self.bias, "none", [], "")
        return linear(x, self.weight, self.bias)

    @cached_property
    def _by_onednn(self) -> bool:
        weight, onednn = self.weight, torch.ops.mkldnn
        there = torch.backends.mkldnn.is_available() and hasattr(onednn, "_linear_pointwise")
        if not there or weight.device.type != "cpu" or weight.numel() < LARGE:
            return False
        return weight.dtype == torch.float32 or weight.dtype == torch.bfloat16 and onednn._is_mkldnn_bf16_supported()


class FastLayer:
    """One decoder layer. Rows are [n, d]."""

    def __init__(self, layer: nn.Module, index: int):
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.scaling, self.width = index, attention.scaling, attention.head_dim
        self.window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        self.before, self.between = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.heads, self.kv_heads = (proj.out_features // self.width for proj in (attention.q_proj, attention.k_proj))
        self.qkv, self.out = (
            Product.of(attention.q_proj, attention.k_proj, attention.v_proj),
            Product.of(attention.o_proj),
        )
        self.gate_up, self.down = Product.of(mlp.gate_proj, mlp.up_proj), Product.of(mlp.down_proj)
        self.products = [self.qkv, self.out, self.gate_up, self.down]
        self.head_norms = [_norm(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, call: Call) -> Tensor:
        hidden = hidden + self.out(self._attention(self.before(hidden), cos, sin, call))
        gate, up = self.gate_up(self.between(hidden)).chunk(2, -1)
        return hidden + self.down(silu(gate) * up)

    def _attention(self, rows: Tensor, cos: Tensor, sin: Tensor, call: Call) -> Tensor:
        mixed = self.qkv(rows).view(rows.shape[0], -1, self.width).transpose(0, 1)  # [heads + 2 kv_heads, n, d]
        turning, values = mixed[:-self.kv_heads], mixed[-self.kv_heads:]
        if self.head_norms:
            query_norm, key_norm = self.head_norms
            turning = torch.cat([query_norm(turning[:self.heads]), key_norm(turning[self.heads:])])
        turned = torch.addcmul(turning * cos, turning.roll(self.width // 2, -1), sin)
        out = attend_all(
            self.index, (turned[: self.heads], turned[self.heads :], values), call, self.scaling, self.window
        )
        return out.transpose(0, 1).reshape(rows.shape[0], -1)


class FusedLlama:
    """The whole network: token ids or embeddings in, rows of logits out."""

    def __init__(self, network: PreTrainedModel, context: int):
        inner = network.model
        self.embeddings, self.head = inner.embed_tokens.weight, Product.of(network.lm_head)
        self.layers = [FastLayer(layer, index) for index, layer in enumerate(inner.layers)]
        self.norm = _norm(inner.norm)
        self.cos, self.sin = _angles(inner.rotary_emb, context, self.embeddings)
        self.bytes = sum(weight.nbytes for weight in network.parameters())
        self.weights = sum(weight.numel() for weight in network.parameters())
        if self.weights <= SMALL:
            for product in (self.head, *(product for layer in self.layers for product in layer.products)):
                product.pack()

    def turn_back(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries or keys [heads, n, d] as they would be so many positions [n] earlier."""
        # a table may be stretched, and that was done once
        cos, sin = (table[positions] / self.cos[0, 0] for table in (self.cos, self.sin))
        return torch.addcmul(rows * cos, rows.roll(rows.shape[-1] // 2, -1), -sin)

    def __call__(
        self,
        positions: Tensor,
        wanted: Tensor | int,
        call: Call,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Logits [rows, V] of the wanted rows, an index or 0 for all. positions, ids: [1, rows]; embeddings: [1, rows,
        d].
        """
        hidden = embedding(input_ids[0], self.embeddings) if inputs_embeds is None else inputs_embeds[0]
        cos, sin = self.cos[positions[0]], self.sin[positions[0]]
        if call.plan.is_plain:
            for layer in self.layers:
                hidden = layer(hidden, cos, sin, call)
        else:
            hidden = self._planned(hidden, cos, sin, call)
        return self.head(self.norm(hidden if isinstance(wanted, int) else hidden[wanted]))

    def _planned(self, hidden: Tensor, cos: Tensor, sin: Tensor, call: Call) -> Tensor:
        """The layers that the plan runs, capturing hidden states on the way."""
        for layer in self.layers:
            hidden = call.enter(layer.index, hidden)
            if call.plan.runs(layer.index):
                hidden = layer(hidden, cos, sin, call)
        return call.enter(len(self.layers), hidden)


def fast_path(network: PreTrainedModel, context: int) -> Callable | None:
    """The lean way through a network, or None where it has none: another kind, quantised weights, another device or
    dtype.
    """
    config, weight = network.config, network.get_input_embeddings().weight
    plain = (
        weight.device.type in DEVICES
        and weight.dtype in DTYPES
        and len({weight.device for weight in network.parameters()}) == 1
    )
    if config.model_type not in KINDS or not plain or not _is_ordinary(network):
        return None
    return FusedLlama(network, context)


def _is_ordinary(network: PreTrainedModel) -> bool:
    """Whether every part is what the lean way takes it for."""
    inner = network.model
    rope = getattr(inner.rotary_emb, "rope_type", "")
    products = [module for name, module in network.named_modules() if name.endswith(("_proj", "lm_head"))]
    activations = {type(layer.mlp.act_fn) for layer in inner.layers}
    return (
        rope in STATIC_ROPE and all(type(module) is nn.Linear for module in products) and activations == {type(_silu())}
    )


def _silu() -> nn.Module:
    from transformers.activations import ACT2FN
    return ACT2FN["silu"]


def _norm(module: nn.Module) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _angles(rotary: nn.Module, context: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [context, d]; the sine's first half is negative, so that turning is one
    product and one swap of halves.
    """
    cos, sin = (table[0] for table in rotary(like[None, :1], torch.arange(context, device=like.device)[None]))
    return cos.contiguous(), torch.cat([-sin[:, :sin.shape[1] // 2], sin[:, sin.shape[1] // 2:]], -1)
