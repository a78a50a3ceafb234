"""Attention of few rows over many slots, with the slots divided among the processors of a GPU; Triton kernels.

Each program attends over some of the slots and keeps the maximum and the sum of its softmax; a second kernel weighs the
parts by these. Dao et al. 2023, Flash-Decoding.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

try:  # part of torch's builds for CUDA on Linux; it compiles the kernels at the first use and keeps them on disk
    import triton
    import triton.language as tl
except ImportError:
    triton = None

log = logging.getLogger(__name__)
SLOTS = 64  # read at a time
MOST_PARTS = 32  # per head
PROGRAMS = 256  # about two per processor of a large GPU
MOST_ROWS = 64  # of one program
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TOLERANCE = 2e-2  # of half precision in the first check
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def kernel_for(query: Tensor) -> Attend | None:
    """`split_keys` where it runs for queries like these [heads, n, d]; otherwise None."""
    if triton is None or not query.is_cuda or query.dtype not in DTYPES or query.shape[2] > 256:
        return None
    return split_keys if _works(query.device, query.dtype) else None


@cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels compile on this machine and attend as torch does; Triton needs a C compiler, for example."""
    try:
        query, keys, values = (
            torch.arange(heads * n * 64, device=device).mul(rate).sin().view(heads, n, 64).to(dtype)
            for heads, n, rate in ((4, 3, 0.7), (2, 256, 1.3), (2, 256, 2.1))
        )
        seen = torch.ones(1, 3, 256, dtype=torch.bool, device=device).tril(128)
        found = split_keys(query, keys, values, seen, 0.125)
        wanted = torch.nn.functional.scaled_dot_product_attention(
            query.float(), *(held.float().repeat_interleave(2, 0) for held in (keys, values)), seen, scale=0.125
        )
        return bool((found.float() - wanted).abs().max() < TOLERANCE)
    except Exception as reason:  # a compiler may fail in any way
        log.warning("attention is not divided by keys: %s", reason)
        return False


def split_keys(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scaling: float) -> Tensor:
    """Attention [heads, places * rows, d] as `RecordedAttention`."""
    (places, rows, slots), (heads, n, d), kv_heads = seen.shape, query.shape, len(keys)
    group = heads // kv_heads
    block = min(MOST_ROWS, max(16, triton.next_power_of_2(group * rows)))
    blocks = triton.cdiv(group * rows, block)
    parts = max(1, min(MOST_PARTS, triton.cdiv(slots, SLOTS), PROGRAMS // (kv_heads * places * blocks)))
    chunk = triton.cdiv(triton.cdiv(slots, SLOTS), parts) * SLOTS
    parts = triton.cdiv(slots, chunk)
    mixed = torch.empty(kv_heads * places, parts, group * rows, d, dtype=torch.float32, device=query.device)
    totals = torch.empty(kv_heads * places, parts, group * rows, 2, dtype=torch.float32, device=query.device)
    out = torch.empty(n, heads, d, dtype=query.dtype, device=query.device)
    query = query if query.stride(2) == 1 else query.contiguous()
    width = triton.next_power_of_2(d)
    _attend_part[kv_heads * places, parts, blocks](
        query, keys, values, seen.view(torch.uint8), mixed, totals, scaling, query.stride(0), query.stride(1),
        keys.stride(0), slots, chunk, rows, group, d, parts, places,
        BLOCK=block, STEP=SLOTS, WIDTH=width, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
    )
    _join_parts[kv_heads * places, group * rows](
        mixed, totals, out, rows, group, d, parts, places, heads, MOST=MOST_PARTS, WIDTH=width
    )
    return out.transpose(0, 1)


if triton is not None:
    COUNTS = ["slots", "chunk", "rows", "group", "d", "parts", "places"]  # one kernel for all of them

    @triton.jit(do_not_specialize=COUNTS)
    def _attend_part(query, keys, values, seen, mixed, totals, scaling, query_head, query_row, key_head, slots, chunk,
                     rows, group, d, parts, places, BLOCK: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
                     PRECISION: tl.constexpr):
        """One part of the slots for one KV head of one place, and `BLOCK` of its rows, head by head of the group."""
        at, part = tl.program_id(0), tl.program_id(1)
        head, place = at // places, at % places
        own = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        live, row = own < group * rows, own % rows
        column = tl.arange(0, WIDTH)
        inside = column < d
        start = query + (head * group + own // rows) * query_head + (place * rows + row) * query_row
        asked = tl.load(start[:, None] + column[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        most = tl.full([BLOCK], -1e30, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        sums = tl.zeros([BLOCK, WIDTH], tl.float32)
        first = head.to(tl.int64) * key_head + (place * slots).to(tl.int64) * d
        for begin in range(part * chunk, tl.minimum(part * chunk + chunk, slots), STEP):
            slot = begin + tl.arange(0, STEP)
            held = (slot < slots)[:, None] & inside[None, :]
            place_of = first + slot[:, None] * d + column[None, :]
            key = tl.load(keys + place_of, mask=held, other=0.0)
            scores = tl.dot(asked, tl.trans(key), input_precision=PRECISION) * scaling
            visible = tl.load(
                seen + (place * rows + row)[:, None] * slots + slot[None, :],
                mask=live[:, None] & (slot < slots)[None, :], other=0,
            ) != 0
            scores = tl.where(visible, scores, -1e30)
            largest = tl.maximum(most, tl.max(scores, 1))
            shrink = tl.exp(most - largest)
            weights = tl.where(visible, tl.exp(scores - largest[:, None]), 0.0)
            value = tl.load(values + place_of, mask=held, other=0.0)
            sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
            total, most = total * shrink + tl.sum(weights, 1), largest
        into = (at * parts + part) * (group * rows) + own
        tl.store(mixed + into[:, None] * d + column[None, :], sums, mask=live[:, None] & inside[None, :])
        tl.store(totals + into * 2, most, mask=live)
        tl.store(totals + into * 2 + 1, total, mask=live)

    @triton.jit(do_not_specialize=["rows", "group", "d", "parts", "places", "heads"])
    def _join_parts(mixed, totals, out, rows, group, d, parts, places, heads, MOST: tl.constexpr, WIDTH: tl.constexpr):
        """One row of one head: the mean of its parts, weighted by their shares of the softmax."""
        at, own = tl.program_id(0), tl.program_id(1)
        head, place = at // places, at % places
        part, column = tl.arange(0, MOST), tl.arange(0, WIDTH)
        live, inside = part < parts, column < d
        place_of = (at * parts + part) * (group * rows) + own
        most = tl.load(totals + place_of * 2, mask=live, other=-1e30)
        total = tl.load(totals + place_of * 2 + 1, mask=live, other=0.0)
        share = tl.exp(most - tl.max(most, 0))
        sums = tl.load(mixed + place_of[:, None] * d + column[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        mean = tl.sum(sums * share[:, None], 0) / tl.sum(total * share, 0)
        row = (place * rows + own % rows) * heads + head * group + own // rows
        tl.store(out + row * d + column, mean.to(out.dtype.element_ty), mask=inside)
