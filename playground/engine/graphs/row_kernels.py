"""Decoder layers of the Llama family over few rows, compiled by numba for this processor and cached on disk.

A small network spends most of a token on a CPU on torch's operations, and the rest on reading its weights. Here a
layer is three functions, and weights are read as the bfloat16 numbers that a checkpoint stores: widened in registers,
which is exact, they take half the memory traffic of float32. All arithmetic is in float32.

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
def project_two(weights, rows, out):
    """As `project`, for two rows: each weight is read and widened once."""
    first, second = rows[0], rows[1]
    for i in range(len(weights)):
        row, a, b = weights[i], F(0), F(0)
        for j in range(row.size):
            weight = widened(row[j])
            a += weight * first[j]
            b += weight * second[j]
        out[0, i], out[1, i] = a, b


@njit(**FLAGS)
def project_four(weights, rows, out):
    """As `project`, for four rows."""
    first, second, third, fourth = rows[0], rows[1], rows[2], rows[3]
    for i in range(len(weights)):
        row, a, b, c, d = weights[i], F(0), F(0), F(0), F(0)
        for j in range(row.size):
            weight = widened(row[j])
            a += weight * first[j]
            b += weight * second[j]
            c += weight * third[j]
            d += weight * fourth[j]
        out[0, i], out[1, i], out[2, i], out[3, i] = a, b, c, d


@njit(**FLAGS)
def project(weights, rows, out):
    """Write the products of weights [n, d] with rows [rows, d] to `out` [rows, n]."""
    done = len(rows) // 4 * 4
    for r in range(0, done, 4):
        project_four(weights, rows[r:r + 4], out[r:r + 4])
    if len(rows) - done >= 2:
        project_two(weights, rows[done:done + 2], out[done:done + 2])
        done += 2
    if done < len(rows):
        for i in range(len(weights)):
            out[done, i] = dot(weights[i], rows[done])


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
def score(query, keys, scaling, scores):
    """Scaled products of one query [d] with keys [slots, d]."""
    for slot in range(len(keys)):
        key, product = keys[slot], F(0)
        for j in range(query.size):
            product += query[j] * key[j]
        scores[slot] = product * scaling


@njit(**FLAGS)
def weigh(scores, seen):
    """Softmax, in place; of the last slots only those that are seen have a weight."""
    first, top, total = scores.size - seen.size, F(-np.inf), F(0)
    for slot in range(scores.size):
        top = max(top, scores[slot])  # also of those it does not see: only a scale
    for slot in range(scores.size):
        scores[slot] = exponential(scores[slot] - top)
    for slot in range(first, scores.size):
        scores[slot] *= seen[slot - first]
    for slot in range(scores.size):
        total += scores[slot]
    for slot in range(scores.size):
        scores[slot] /= total


@njit(**FLAGS)
def mix(weights, values, out):
    """Add values [slots, d], each times its weight, to `out` [d]."""
    for slot in range(len(values)):
        share, value = weights[slot], values[slot]
        for j in range(out.size):
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
BEFORE = types.void(ROWS, ROW, types.float32, HALVES, ROWS, ROWS, types.int64, ROWS)
ATTEND = types.void(ROWS, CACHE, CACHE, types.int64, CACHE, CACHE, types.int64, SEEN, types.float32, ROWS)
AFTER = types.void(ROWS, ROWS, HALVES, ROW, types.float32, HALVES, HALVES)
LOGITS = types.void(ROWS, ROW, types.float32, HALVES, ROWS)


@njit(BEFORE, **FLAGS)
def run_before_attention(hidden, norm, epsilon, qkv, cos, sin, turned, states):
    """Write the states of all query, key and value heads, in this order, to `states` [rows, heads head_dim].

    hidden: [rows, d]. The rotary embedding, cos and sin [rows, head_dim], turns the first `turned` heads.
    """
    normed = np.empty_like(hidden)
    normalise(hidden, norm, epsilon, normed)
    project(qkv, normed, states)
    for r in range(len(hidden)):
        rotate(states[r].reshape(-1, cos.shape[1])[:turned], cos[r], sin[r])


@njit(ATTEND, **FLAGS)
def attend(states, old_keys, old_values, shared, keys, values, trunk, seen, scaling, mixed):
    """Write the key and value states of a cache's new rows, and attend.

    states: [rows, (heads + 2 kv_heads) head_dim]. old_keys, old_values: [kv_heads, slots, head_dim], whose first
    `shared` slots come before those of keys and values. Every row sees them and the first `trunk` of the latter. seen:
    [rows, scratch], which of the slots after them each row sees; the last ones are the rows' own, and are written.
    mixed: [rows, heads head_dim], the result.
    """
    count, kv_heads, head_dim = len(states), keys.shape[0], keys.shape[2]
    heads, own = mixed.shape[1] // head_dim, trunk + seen.shape[1]
    weights = np.empty(shared + own, F)
    for r in range(count):
        each, slot = states[r].reshape(-1, head_dim), own - count + r
        keys[:, slot] = each[heads:heads + kv_heads]
        values[:, slot] = each[heads + kv_heads:]
    for r in range(count):
        for head in range(heads):
            group, part = head * kv_heads // heads, slice(head * head_dim, (head + 1) * head_dim)
            query, out = states[r, part], mixed[r, part]
            score(query, old_keys[group, :shared], scaling, weights[:shared])
            score(query, keys[group, :own], scaling, weights[shared:])
            weigh(weights, seen[r])
            out[:] = F(0)
            mix(weights[:shared], old_values[group, :shared], out)
            mix(weights[shared:], values[group, :own], out)


@njit(AFTER, **FLAGS)
def run_after_attention(hidden, mixed, out, norm, epsilon, gate_up, down):
    """The rest of a layer over hidden states [rows, d], in place."""
    count = len(hidden)
    normed, added = np.empty_like(hidden), np.empty_like(hidden)
    both, active = np.empty((count, len(gate_up)), F), np.empty((count, down.shape[1]), F)
    project(out, mixed, added)
    add(added, hidden)
    normalise(hidden, norm, epsilon, normed)
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
