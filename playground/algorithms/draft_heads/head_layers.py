"""Layers of draft heads, and the KV cache of those that attend.

An attention reads whole texts during training, and a few new rows over a cache while it drafts. The module names are
those of the transformers library's Llama, so that published heads can be read by name.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Linear, Module, RMSNorm
from torch.nn.functional import scaled_dot_product_attention, silu

THETA = 10000.0  # base of the rotary embedding
EPS = 1e-5  # of the norms


class HeadShape(NamedTuple):
    """Sizes of a draft head, those of the target unless it says otherwise."""

    width: int  # hidden size
    heads: int
    kv_heads: int
    head_dim: int  # even
    inner: int  # of the feed-forward block

    @classmethod
    def like(cls, width: int) -> HeadShape:
        """For a target of this width: heads of 64, two query heads to a key head if their number is
        even, feed-forward three times as wide.
        """
        heads = max(1, width // 64)
        kv_heads = heads if heads % 2 else heads // 2
        return cls(width, heads, kv_heads, 64 if width >= 64 else 2 * max(1, width // 2), 3 * width)


class Place(Protocol):
    """The positions of new rows, and what they attend to."""

    positions: Tensor  # [rows]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of query states [..., heads, rows, d] over key and value states [..., kv_heads, rows, d]."""


class LayeredPlace(Place, Protocol):
    """A place of the same rows in every layer of a head."""

    def layer(self, number: int) -> LayeredPlace:
        """The place in a layer, counted from 0."""


class WholeTexts:
    """Rows that are whole texts, [texts, rows, width]: each attends to those before it."""

    def __init__(self, rows: int):
        self.positions = torch.arange(rows)

    def layer(self, number: int) -> WholeTexts:
        return self

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)


class HeadCache:
    """Key and value states of one attention: of the text, then of the draft tokens of this round.

    Further layers of the same head have caches of their own, which are cropped and committed with the first.
    """

    def __init__(self) -> None:
        self.length = 0  # rows of the text
        self.rows = 0  # draft tokens included
        self._states: Tensor | None = None  # keys and values, [2, kv_heads, capacity, d]
        self._further: dict[int, HeadCache] = {}

    def layer(self, number: int) -> HeadCache:
        """The cache of a layer, counted from 0, which is this one."""
        return self._further.setdefault(number, HeadCache()) if number else self

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append states [kv_heads, n, d]; returns all, [kv_heads, rows, d] each."""
        end = self.rows + keys.shape[1]
        if self._states is None or end > self._states.shape[2]:
            grown = keys.new_empty(2, keys.shape[0], max(64, 2 * end), keys.shape[2])
            if self._states is not None:
                grown[:, :, :self.rows] = self._states[:, :, :self.rows]
            self._states = grown
        self._states[0, :, self.rows:end], self._states[1, :, self.rows:end] = keys, values
        self.rows = end
        return self._states[0, :, :end], self._states[1, :, :end]

    def crop(self, length: int) -> None:
        """Drop the draft tokens, and the text from row `length` on."""
        self.length = self.rows = min(self.length, length)
        for cache in self._further.values():
            cache.crop(length)

    def commit(self) -> None:
        """The rows written last become text."""
        self.length = self.rows
        for cache in self._further.values():
            cache.commit()


@dataclass
class NewRows:
    """New rows after a cache: a continuation of the text, or draft tokens.

    `ancestors` [rows, draft tokens] marks the draft tokens that each row sees, itself included; without it every row
    sees those before it.
    """

    cache: HeadCache
    positions: Tensor
    ancestors: Tensor | None = None

    def layer(self, number: int) -> NewRows:
        """The same rows in another layer's cache."""
        return NewRows(self.cache.layer(number), self.positions, self.ancestors)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        before, count = self.cache.rows, query.shape[-2]
        keys, values = self.cache.write(keys, values)
        mask = None
        if self.ancestors is not None:
            text = torch.ones(count, self.cache.length, dtype=torch.bool, device=query.device)
            mask = torch.cat([text, self.ancestors], 1)
        elif count > 1:
            mask = torch.ones(count, before + count, dtype=torch.bool, device=query.device).tril(before)
        return scaled_dot_product_attention(query[None], keys[None], values[None], mask, enable_gqa=True)[0]


def angles(positions: Tensor, width: int, like: Tensor, theta: float = THETA) -> tuple[Tensor, Tensor]:
    """Cosines and sines [rows, width] of the rotary embedding of Llama at positions [rows]; `width` is the heads'."""
    wide = torch.float32 if like.device.type == "mps" else torch.float64  # Apple GPUs have no float64
    exponents = torch.arange(0, width, 2, device=like.device, dtype=wide) / width
    turns = torch.outer(positions.to(exponents), theta ** -exponents)
    turns = torch.cat([turns, turns], 1)
    return turns.cos().to(like), turns.sin().to(like)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Query or key states [..., heads, rows, d] with the rotary embedding."""
    first, second = states.chunk(2, -1)
    return torch.addcmul(states * cos, torch.cat([-second, first], -1), sin)


class SelfAttention(Module):
    """Attention of a Llama layer, whose input may be wider than its output; with `normed` query and key states that of
    a Qwen3 layer.
    """

    def __init__(self, shape: HeadShape, reads: int | None = None, theta: float = THETA, normed: bool = False):
        super().__init__()
        self.shape, self.theta = shape, theta
        reads = reads or shape.width
        self.q_proj = Linear(reads, shape.heads * shape.head_dim, bias=False)
        self.k_proj = Linear(reads, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = Linear(reads, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(shape.head_dim, EPS) if normed else None for _ in "qk")

    def states(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value states [..., heads, rows, d] of rows [..., rows, reads]."""
        query, keys, values = (
            part(rows).unflatten(-1, (-1, self.shape.head_dim)).transpose(-3, -2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None:
            query, keys = self.q_norm(query), self.k_norm(keys)
        cos, sin = angles(positions, self.shape.head_dim, query, self.theta)
        return rotated(query, cos, sin), rotated(keys, cos, sin), values

    def forward(self, rows: Tensor, place: Place) -> Tensor:
        return self.merged(place.attend(*self.states(rows, place.positions)))

    def merged(self, attended: Tensor) -> Tensor:
        """The output [..., rows, width] for what the heads attended to, [..., heads, rows, d]."""
        return self.o_proj(attended.transpose(-3, -2).flatten(-2))


class GatedFeedForward(Module):
    """The gated feed-forward block of a Llama layer."""

    def __init__(self, shape: HeadShape):
        super().__init__()
        self.gate_proj = Linear(shape.width, shape.inner, bias=False)
        self.up_proj = Linear(shape.width, shape.inner, bias=False)
        self.down_proj = Linear(shape.inner, shape.width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(rows)) * self.up_proj(rows))


class DecoderLayer(Module):
    """A Llama layer, or with `normed` query and key states a Qwen3 layer."""

    def __init__(self, shape: HeadShape, theta: float = THETA, normed: bool = False):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, EPS)
        self.self_attn = SelfAttention(shape, theta=theta, normed=normed)
        self.post_attention_layernorm, self.mlp = RMSNorm(shape.width, EPS), GatedFeedForward(shape)

    def forward(self, rows: Tensor, place: Place) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), place)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class ResidualBlock(Module):
    """x + SiLU(W x + b), the identity at first."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = Linear(width, width)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + silu(self.linear(rows))
