"""A target's network with gradients, for trainings: its own weights stay as they are.

The forward of the engine runs without gradients. Cache policies, whose trainings replace the attention, call this one
with attend(layer, query [..., heads, n, d], keys and values [..., kv_heads, n, d]) -> [..., heads, n, d].
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

LINEARS = ("qkv", "out", "gate_up", "down")  # of a layer
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
LowRank = Mapping[str, tuple[Tensor, Tensor]]
"""By "qkv.3" (a projection and its layer): matrices [m, r] and [r, k] whose product is added to the projection."""


class LlamaWeights(Protocol):
    """The network of the engine whose weights are read (`engine.fused_llama.FusedLlama`)."""

    embeddings: Tensor
    head: Any
    layers: list[Any]
    norm: Any
    cos: Tensor
    sin: Tensor


class FrozenLinear(NamedTuple):
    """A linear layer."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype | None) -> FrozenLinear:
        return cls(_copied(layer.weight, dtype), None if layer.bias is None else _copied(layer.bias, dtype))

    def __call__(self, x: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
        product = linear(x, self.weight, self.bias)
        return product if added is None else product + x @ added[0] @ added[1]


class FrozenNorm(NamedTuple):
    """An RMS norm."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, norm: Any, dtype: torch.dtype | None) -> FrozenNorm:
        return cls(_copied(norm.weight, dtype), norm.epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()


@dataclass(frozen=True)
class FrozenLayer:
    """The weights of one decoder layer."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv: FrozenLinear
    out: FrozenLinear
    gate_up: FrozenLinear
    down: FrozenLinear
    norms: tuple[FrozenNorm, FrozenNorm]
    head_norms: list[FrozenNorm]

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype | None) -> FrozenLayer:
        return cls(
            layer.heads,
            layer.kv_heads,
            layer.head_dim,
            FrozenLinear.of(layer.qkv, dtype),
            FrozenLinear.of(layer.out, dtype),
            FrozenLinear.of(layer.ffn.gate_up, dtype),
            FrozenLinear.of(layer.ffn.down, dtype),
            (FrozenNorm.of(layer.input_norm, dtype), FrozenNorm.of(layer.mlp_norm, dtype)),
            [FrozenNorm.of(norm, dtype) for norm in layer.head_norms],
        )

    def states(self, hidden: Tensor, added: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value states before the rotary embedding, [..., heads, n, d]."""
        rows = self.qkv(self.norms[0](hidden), added).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
        query, keys, values = rows.split([self.heads, self.kv_heads, self.kv_heads], -3)
        if self.head_norms:
            query, keys = self.head_norms[0](query), self.head_norms[1](keys)
        return query, keys, values

    def feed_forward(self, normed: Tensor) -> Tensor:
        """The feed-forward network, [..., n, width], of the second norm's output."""
        gate, up = self.gate_up(normed).chunk(2, -1)
        return self.down(silu(gate) * up)


class DifferentiableLlama:
    """The network as products with copies of its weights, in `dtype`, by default float32 or wider.

    Inside of torch's inference mode it may be used without gradients.
    """

    def __init__(self, network: LlamaWeights, dtype: torch.dtype | None = None):
        self.embeddings, self._head = _copied(network.embeddings, dtype), FrozenLinear.of(network.head, dtype)
        self.layers = [FrozenLayer.of(layer, dtype) for layer in network.layers]
        self.norm, self.scaling = FrozenNorm.of(network.norm, dtype), network.layers[0].scaling
        self.cos, self.sin = (_copied(table, dtype) for table in (network.cos, network.sin))  # [positions, head_dim]

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def width(self) -> int:
        return self.embeddings.shape[1]

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings of token ids [..., n], [..., n, width]."""
        return embedding(ids, self.embeddings)

    def __call__(self, hidden: Tensor, positions: Tensor, attend: Attend, added: LowRank | None = None) -> Tensor:
        """The input of the lm_head, [..., n, width], from input embeddings [..., n, width] at positions [..., n]."""
        cos, sin = self.cos[positions], self.sin[positions]
        if positions.dim() > 1:
            cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # for every head
        for index, layer in enumerate(self.layers):
            query, keys, values = layer.states(hidden, (added or {}).get(f"qkv.{index}"))
            query, keys = (rotated(x, cos, sin) for x in (query, keys))
            out = attend(index, query, keys, values).transpose(-3, -2).flatten(-2)
            hidden = hidden + layer.out(out, (added or {}).get(f"out.{index}"))
            hidden = hidden + layer.feed_forward(layer.norms[1](hidden))
        return self.norm(hidden)

    def matrices(self) -> dict[str, Tensor]:
        """All weight matrices, named as in `engine.graphs.fused_llama`."""
        layers = {
            f"{name}.{index}": getattr(layer, name).weight
            for index, layer in enumerate(self.layers) for name in LINEARS
        }
        return {"embeddings": self.embeddings, "head": self._head.weight, **layers}

    def use(self, matrices: Mapping[str, Tensor]) -> None:
        """Compute with these matrices in place of the copies of the same names."""
        self.embeddings = matrices.get("embeddings", self.embeddings)
        self._head = self._head._replace(weight=matrices.get("head", self._head.weight))
        for index, layer in enumerate(self.layers):
            own = {name: getattr(layer, name) for name in LINEARS if f"{name}.{index}" in matrices}
            changed = {name: linear._replace(weight=matrices[f"{name}.{index}"]) for name, linear in own.items()}
            self.layers[index] = replace(layer, **changed)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., n, V] of inputs of the lm_head."""
        return self._head(hidden)

    def attend_causally(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The network's own attention over a text that begins with the rows."""
        return self.attend(query, keys, values)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Softmax attention; the last n of the keys are those of the rows. `mask` [..., n, m] says what they see, all
        keys before their own by default.
        """
        if mask is None:
            rows, slots = query.shape[-2], keys.shape[-2]
            mask = torch.ones(rows, slots, dtype=torch.bool, device=query.device).tril(slots - rows)
        groups = query.shape[-3] // keys.shape[-3]
        keys, values = (x.repeat_interleave(groups, -3) for x in (keys, values))
        return scaled_dot_product_attention(query, keys, values, mask, scale=self.scaling)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """States [..., n, head_dim] with the rotary embedding of cosines and signed sines [..., n, head_dim]."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)


def _copied(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """An ordinary tensor, which gradients may pass through, by default in float32 or wider."""
    with torch.inference_mode(False):
        return weight.detach().clone().to(dtype or torch.promote_types(weight.dtype, torch.float32))
