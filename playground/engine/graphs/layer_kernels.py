"""What lies between the matrix products of a layer, in one Triton kernel each.

A GPU takes two to three microseconds for each small kernel of a recorded forward, however little it computes. Where
torch takes eleven of them per layer, these take five. They compute in float32 and round once.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

CHANNELS = 1024  # of a program of `gated`


class HeadNorms(NamedTuple):
    """Norms of query and key states before the rotary embedding."""

    query: Tensor  # [d]
    key: Tensor
    epsilon: float


def add_norm(hidden: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """hidden + added and its RMS norm, [n, width] each."""
    rows, width = hidden.shape
    total, normed = hidden if added is None else torch.empty_like(hidden), torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        hidden, hidden if added is None else added, weight, total, normed, epsilon, width,
        ADDS=added is not None, BLOCK=block, num_warps=min(16, max(1, block // 256)),
    )
    return total, normed


def gated(both: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side, [n, 2 * channels] -> [n, channels]."""
    rows, channels = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, channels)
    _gated[rows, triton.cdiv(channels, CHANNELS)](both, out, channels, BLOCK=CHANNELS)
    return out


def rotate_and_store(
    states: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor, slots: Tensor, held: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
) -> Tensor:
    """Queries after the rotary embedding, [n, heads, d]; keys, rotated too, and values go to their slots.

    states: query, key and value heads of each row, [n, (heads + 2 * kv_heads) * d]. tables: cosines and sines of every
    position, [context, d], the first half of the sines negated. held: keys and values, [kv_heads, slots, d].
    """
    keys, values = held
    (kv_heads, _, d), n = keys.shape, len(states)
    all_heads = states.shape[1] // d
    heads = all_heads - 2 * kv_heads
    query = states.new_empty(n, heads, d)
    own = norms or HeadNorms(states, states, 0.0)
    _rotate_and_store[n, all_heads](
        states, *tables, positions, slots, query, keys, values, own.query, own.key, own.epsilon, heads, kv_heads, d,
        keys.stride(0), NORMS=norms is not None, WIDTH=triton.next_power_of_2(d), num_warps=1,
    )
    return query


if triton is not None:

    @triton.jit
    def _add_norm(hidden, added, weight, total, normed, epsilon, width, ADDS: tl.constexpr, BLOCK: tl.constexpr):
        start = tl.program_id(0).to(tl.int64) * width
        column = tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(hidden + start + column, mask=inside, other=0.0)
        if ADDS:
            sums = x.to(tl.float32) + tl.load(added + start + column, mask=inside, other=0.0).to(tl.float32)
            x = sums.to(x.dtype)
            tl.store(total + start + column, x, mask=inside)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + epsilon)
        scaled = wide * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + start + column, scaled.to(x.dtype), mask=inside)

    @triton.jit
    def _gated(both, out, channels, BLOCK: tl.constexpr):
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < channels
        start = both + row * 2 * channels + column
        gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(start + channels, mask=inside, other=0.0).to(tl.float32)
        product = gate / (1 + tl.exp(-gate)) * up
        tl.store(out + row * channels + column, product.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _rotate_and_store(states, cos, sin, positions, slots, query, keys, values, query_norm, key_norm, epsilon, heads,
                          kv_heads, d, key_head, NORMS: tl.constexpr, WIDTH: tl.constexpr):
        """One head of one row."""
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        column = tl.arange(0, WIDTH)
        inside = column < d
        start = states + (row * (heads + 2 * kv_heads) + head) * d
        x = tl.load(start + column, mask=inside, other=0.0)
        slot = tl.load(slots + row) * d
        if head >= heads + kv_heads:
            tl.store(values + (head - heads - kv_heads).to(tl.int64) * key_head + slot + column, x, mask=inside)
        else:
            other = (column + d // 2) % d  # the half that rotates into a column
            own, turned = x.to(tl.float32), tl.load(start + other, mask=inside, other=0.0).to(tl.float32)
            if NORMS:
                scale = tl.rsqrt(tl.sum(own * own, 0) / d + epsilon)
                weight = query_norm if head < heads else key_norm
                own = (own * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
                turned = (turned * scale * tl.load(weight + other, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
                own, turned = own.to(tl.float32), turned.to(tl.float32)
            at = tl.load(positions + row) * d + column
            near = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
            far = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
            rotated = (own * near + turned * far).to(x.dtype)
            if head < heads:
                tl.store(query + (row * heads + head) * d + column, rotated, mask=inside)
            else:
                tl.store(keys + (head - heads).to(tl.int64) * key_head + slot + column, rotated, mask=inside)
