"""The project's own kernels beside torch's operations in float64: the largest difference, as JSON lines."""
from __future__ import annotations

import json
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from playground.engine.attention.recorded_attention import RecordedAttention
from playground.engine.attention.split_keys import kernel_for
from playground.engine.graphs.layer_kernels import HeadNorms, add_norm, gated, rotate_and_store

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}  # and the largest difference that is rounding
HEADS = ((14, 2, 64), (32, 8, 128))  # heads, KV heads, head_dim
SIZES = ((1, 1, 256), (4, 1, 256), (2, 8, 384), (1, 64, 512), (1, 1, 3072))  # places, rows, slots


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def attention(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float) -> Tensor:
    """By definition, in float64."""
    (places, rows, slots), (heads, n, d), kv_heads = seen.shape, query.shape, len(keys)
    query = query.double().reshape(kv_heads, heads // kv_heads, places, rows, d)
    keys, values = (held.double().view(kv_heads, 1, places, slots, d) for held in (keys, values))
    scores = (query @ keys.transpose(-1, -2) * scaling).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ values).reshape(heads, n, d)


def worst(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).abs().nan_to_num(nan=float("inf")).max())


def attention_errors(dtype: torch.dtype) -> tuple[float, float]:
    """Of the kernel, and of the products that replace it where it does not run."""
    errors = []
    for (heads, kv_heads, d), (places, rows, slots) in product(HEADS, SIZES):
        query = normal(places * rows, heads, d, dtype=dtype).transpose(0, 1)
        keys, values = (normal(kv_heads, places * slots, d, dtype=dtype) for _ in range(2))
        seen = torch.rand(places, rows, slots, device="cuda") < 0.5
        seen[..., -1] = True
        found, inputs = RecordedAttention(seen), (query, keys, values, d ** -0.5)
        wanted = attention(query, keys, values, seen, d ** -0.5)
        errors.append((worst(found(*inputs), wanted), worst(found._products(*inputs), wanted)))
    return tuple(map(max, zip(*errors)))


def layer_error(dtype: torch.dtype, norms: bool) -> float:
    """Of norms, activation and rotary embedding."""
    heads, kv_heads, d, n, context = 14, 2, 64, 5, 40
    hidden, added, weight = (normal(*shape, dtype=dtype) for shape in ((n, 896), (n, 896), (896,)))
    total, normed = add_norm(hidden, added, weight, 1e-5)
    both = normal(n, 2 * 4864, dtype=dtype)
    gate, up = both.double().chunk(2, -1)
    states = normal(n, (heads + 2 * kv_heads) * d, dtype=dtype)
    tables, held = ([normal(rows, d, dtype=dtype) for _ in range(2)] for rows in (context, kv_heads * 20))
    held = [each.view(kv_heads, 20, d) for each in held]
    positions, slots = (torch.tensor(numbers, device="cuda") for numbers in ([3, 9, 1, 0, 39], [4, 0, 7, 2, 19]))
    weights = HeadNorms(normal(d, dtype=dtype), normal(d, dtype=dtype), 1e-6) if norms else None
    query = rotate_and_store(states, tables, positions, slots, held, weights)
    each = states.double().view(n, -1, d).transpose(0, 1)
    turned = each[:-kv_heads]
    if norms:
        parts = (turned[:heads], weights.query), (turned[heads:], weights.key)
        turned = torch.cat([rms_norm(part, (d,), own.double(), 1e-6) for part, own in parts])
    cos, sin = (table.double()[positions] for table in tables)
    turned = turned * cos + turned.roll(d // 2, -1) * sin
    return max(
        worst(total, hidden + added), worst(normed, rms_norm((hidden + added).double(), (896,), weight.double(), 1e-5)),
        worst(gated(both), silu(gate) * up), worst(query.transpose(0, 1), turned[:heads]),
        worst(held[0][:, slots], turned[heads:]), worst(held[1][:, slots], each[-kv_heads:]),
    )


def main() -> None:
    torch.manual_seed(0)
    for dtype, most in DTYPES.items():
        if kernel_for(normal(1, 1, 64, dtype=dtype)) is None:
            print(json.dumps({"kernels": "do not run here", "dtype": str(dtype)}))
            continue
        split, products = attention_errors(dtype)
        layers = max(layer_error(dtype, norms) for norms in (False, True))
        # values of a norm and of an activation are up to ten times those of attention
        right = split < most and products < most and layers < 10 * most
        print(json.dumps({"dtype": str(dtype)[6:], "attention": split, "products": products, "layers": layers,
                          "right": right}), flush=True)


if __name__ == "__main__":
    main()
