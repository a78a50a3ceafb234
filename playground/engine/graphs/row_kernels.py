"""One decoder layer of the Llama family over few rows, compiled by numba for this processor and cached on disk.

A small network spends most of a token on a CPU on torch's operations, and the rest on reading its weights. Here a layer
is one function, and weights are read as the bfloat16 numbers that a checkpoint stores: widened in registers, which is
exact, they take half the memory traffic of float32. All arithmetic is in float32.

Arrays are float32 and contiguous, weights uint16 (the bits of bfloat16). Nothing here checks a bound: the caller does.
"""
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

F, INT = np.float32, np.int32
# sums may be reordered and products contracted; NaN and infinities keep their meaning
FLAGS = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "cache": True, "nogil": True, "error_model": "numpy"}
LOG2_E, LN2_HIGH, LN2_LOW = F(1.44269504), F(0.693359375), F(-2.12194440e-4)
LEAST, MOST = F(-87), F(88)  # exponents between which e^x is a normal float32


@intrinsic
def widened(_, half):
    """The float32 with the upper bits `half`, a uint16."""
    def emit(context, builder, signature, arguments):
        bits = builder.zext(arguments[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, ir.Constant(ir.IntType(32), 16)), ir.FloatType())
    return types.float32(types.uint16), emit


@intrinsic
def float_of_bits(_, bits):
    """The float32 with these bits, an int32."""
    def emit(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())
    return types.float32(types.int32), emit


@njit(inline="always", **FLAGS)
def exponential(x):
    """e^x within two units in the last place, in operations that vectorise (Cephes, S. Moshier)."""
    x = max(min(x, MOST), LEAST)
    power = np.floor(x * LOG2_E + F(0.5))
    rest = x - power * LN2_HIGH - power * LN2_LOW
    series = F(1.9875691500e-4)
    for factor in (F(1.3981999507e-3), F(8.3334519073e-3), F(4.1665795894e-2), F(1.6666665459e-1), F(5.0000001201e-1)):
        series = series * rest + factor
    return (series * rest * rest + rest + F(1)) * float_of_bits((INT(power) + INT(127)) << INT(23))


@njit(**FLAGS)
def dot(weights, row):
    """Product of one row of weights with one row."""
    total = F(0)
    for j in range(row.size):
        total += widened(weights[j]) * row[j]
    return total


@njit(**FLAGS)
def project(weights, rows, out):
    """Write the products of weights [n, d] with rows [rows, d] to `out` [rows, n]."""
    for i in range(len(weights)):
        for r in range(len(rows)):
            out[r, i] = dot(weights[i], rows[r])


@njit(**FLAGS)
def add(rows, out):
    """Add rows to `out`, both [rows, d]."""
    for r in range(len(rows)):
        for j in range(rows.shape[1]):
            out[r, j] += rows[r, j]


@njit(**FLAGS)
def normalise(rows, weight, epsilon, out):
    """RMS norm of rows [rows, d]."""
    for r in range(len(rows)):
        row, normed, squares = rows[r], out[r], F(0)
        for j in range(row.size):
            squares += row[j] * row[j]
        factor = F(1) / np.sqrt(squares / F(row.size) + epsilon)
        for j in range(row.size):
            normed[j] = row[j] * factor * weight[j]


@njit(**FLAGS)
def rotate(states, cos, sin):
    """The rotary embedding of one row, states [heads, d]; the first half of the sines is negated."""
    half = cos.size // 2
    for head in range(len(states)):
        low, high = states[head, :half], states[head, half:]
        for j in range(half):
            first, second = low[j], high[j]
            low[j] = first * cos[j] + second * sin[j]
            high[j] = second * cos[half + j] + first * sin[half + j]


@njit(**FLAGS)
def attend(query, keys, values, seen, scaling, weights, out):
    """Attention of one query [d] over slots [slots, d]; it may not see all of the last ones. Overwrites `weights`."""
    first, top, total = len(keys) - len(seen), F(-np.inf), F(0)
    for slot in range(len(keys)):
        key, score = keys[slot], F(0)
        for j in range(query.size):
            score += query[j] * key[j]
        weights[slot] = score * scaling
    for slot in range(len(keys)):
        top = max(top, weights[slot])  # also of those it does not see: only a scale
    for slot in range(len(keys)):
        weights[slot] = exponential(weights[slot] - top)
    for slot in range(first, len(keys)):
        weights[slot] *= seen[slot - first]
    for slot in range(len(keys)):
        total += weights[slot]
    out[:] = F(0)
    for slot in range(len(keys)):
        share, value = weights[slot] / total, values[slot]
        for j in range(query.size):
            out[j] += share * value[j]


@njit(**FLAGS)
def gated(both, out):
    """silu of the first half of each row times its second half."""
    width = out.shape[1]
    for r in range(len(both)):
        gate, up, row = both[r, :width], both[r, width:], out[r]
        for j in range(width):
            row[j] = gate[j] / (F(1) + exponential(-gate[j])) * up[j]


HALVES, ROWS, ROW = types.uint16[:, ::1], types.float32[:, ::1], types.float32[::1]
CACHE, SEEN = types.float32[:, :, ::1], types.uint8[:, ::1]
LAYER = types.void(ROWS, ROW, ROW, types.float32, HALVES, HALVES, HALVES, HALVES, ROWS, ROWS, CACHE, CACHE, types.int64,
                   SEEN, types.float32)
LOGITS = types.void(ROWS, ROW, types.float32, HALVES, ROWS)


@njit(LAYER, **FLAGS)
def run_layer(hidden, input_norm, mlp_norm, epsilon, qkv, out, gate_up, down, cos, sin, keys, values, trunk, seen,
              scaling):
    """One decoder layer over hidden states [rows, d], in place.

    keys, values: [kv_heads, slots, head_dim]; every row sees the first `trunk` slots. seen: [rows, scratch], which of
    the slots after them each row sees; the last ones are the rows' own, and are written.
    """
    count, head_dim, kv_heads = len(hidden), cos.shape[1], len(keys)
    heads, scratch = len(qkv) // head_dim - 2 * kv_heads, seen.shape[1]
    normed, added = np.empty_like(hidden), np.empty_like(hidden)
    states, mixed = np.empty((count, len(qkv)), F), np.empty((count, heads * head_dim), F)
    both, active = np.empty((count, len(gate_up)), F), np.empty((count, down.shape[1]), F)
    weights = np.empty(trunk + scratch, F)
    normalise(hidden, input_norm, epsilon, normed)
    project(qkv, normed, states)
    for r in range(count):
        each, slot = states[r].reshape(-1, head_dim), trunk + scratch - count + r
        rotate(each[:heads + kv_heads], cos[r], sin[r])
        keys[:, slot] = each[heads:heads + kv_heads]
        values[:, slot] = each[heads + kv_heads:]
    for r in range(count):
        for head in range(heads):
            group, part = head * kv_heads // heads, slice(head * head_dim, (head + 1) * head_dim)
            attend(states[r, part], keys[group, :trunk + scratch], values[group, :trunk + scratch], seen[r], scaling,
                   weights, mixed[r, part])
    project(out, mixed, added)
    add(added, hidden)
    normalise(hidden, mlp_norm, epsilon, normed)
    project(gate_up, normed, both)
    gated(both, active)
    project(down, active, added)
    add(added, hidden)


@njit(LOGITS, **FLAGS)
def read_logits(hidden, norm, epsilon, head, logits):
    """Logits [rows, V] of hidden states [rows, d] after the last layer."""
    normed = np.empty_like(hidden)
    normalise(hidden, norm, epsilon, normed)
    project(head, normed, logits)
