"""TurboQuant: vLLM's centroids, its codes number by number, Max's table of errors, and wrong variants."""
from __future__ import annotations

import json
import math
import struct

import pytest
import torch
from tables import watch
from torch import Tensor

from playground.contract import Full, find, make
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from strategies.kv_cache import turboquant
from support.budget_policies import roomy
from support.eviction import LENGTH, PROMPT, alone, course, models
from support.packed_caches import rows
from support.turboquant_centroids import OUT, SIZES
from support.wrong_variants import refused

TurboQuant = find("turboquant")
COLLAPSES = {"turboquant": roomy("turboquant", recent=1024)}
REFERENCE = json.loads(OUT.read_text(encoding="utf-8"))
FORMATS = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}
STRETCHED = rows(2, 9, 32, dtype=torch.float32) * torch.linspace(0.1, 30, 32) + torch.linspace(-3, 3, 9)[:, None]


def half(x: float) -> float:
    return struct.unpack("<e", struct.pack("<e", x))[0]


# --- centroids ---


@pytest.mark.oracle("turboquant")
@pytest.mark.parametrize("d, bits", SIZES)
def test_centroids_are_those_of_vllm(d, bits):
    assert turboquant.centroids(d, bits).tolist() == pytest.approx(REFERENCE[f"{d} {bits}"], abs=2e-7)


@pytest.mark.parametrize("bits, levels", [
    (3, [0.2451, 0.7560, 1.344, 2.152]),
    (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
])
def test_centroids_are_those_of_maxs_table(bits, levels):
    """Max 1960, quantising for minimum distortion: a normal distribution of variance 1."""
    assert turboquant.centroids(1, bits).tolist() == pytest.approx([*(-x for x in reversed(levels)), *levels], abs=5e-3)


# --- codes ---


def key_by_hand(key: list[float], bits: int) -> list[float]:
    """A key as vLLM writes and reads it, number by number; bits of the row and column tell a Hadamard sign."""
    d, levels = len(key), REFERENCE[f"{len(key)} {bits}"]
    norm = math.sqrt(sum(x * x for x in key))
    turned = turned_by_hand([x / (norm + 1e-8) for x in key])
    middles = [(a + b) / 2 for a, b in zip(levels, levels[1:])]
    chosen = [levels[sum(y >= middle for middle in middles)] for y in turned]
    length = math.sqrt(sum(c * c for c in chosen) + 1e-16)
    return turned_by_hand([half(norm) * c / length for c in chosen][:d])


def turned_by_hand(row: list[float]) -> list[float]:
    d = len(row)
    return [sum(x * (-1) ** (i & j).bit_count() for i, x in enumerate(row)) / math.sqrt(d) for j in range(d)]


def value_by_hand(value: list[float], bits: int) -> list[float]:
    low, top = min(value), 2**bits - 1
    scale = max((max(value) - low) / top, 1e-8)
    return [min(top, int((x - low) / scale + 0.5)) * half(scale) + half(low) for x in value]


def float_by_hand(key: list[float]) -> list[float]:
    """The nearest number with 3 bits of mantissa, from 2^-6 to 448."""
    found = []
    for x in key:
        step = 2.0 ** (max(math.frexp(x)[1] - 1, -6) - 3)
        found.append(round(x / step) * step)
    return found


def by_hand(written: Tensor, part: str, format: str) -> Tensor:
    bits = FORMATS[format][part == "values"]
    rule = (lambda row, bits: float_by_hand(row)) if bits == 8 else key_by_hand if part == "keys" else value_by_hand
    return torch.tensor([[rule(token, bits) for token in head] for head in written.tolist()])


def check_formats(policy: type) -> None:
    """Keys and values are written token by token after a prompt of five, and read back."""
    for format in FORMATS:
        for part in ("keys", "values"):
            made, packed = policy(format=format, recent=1), None
            for end, count in ((6, 5), (7, 1), (9, 2)):
                done = packed.count if packed else 0
                assert made.quantise_count(part, end - done) == count
                packed = made.quantise(part, STRETCHED[:, done:done + count], packed)
            assert (packed.count, packed.unpack(3).shape) == (8, (2, 11, 32))
            expected = by_hand(STRETCHED[:, :8], part, format)
            assert torch.allclose(packed.unpack(3)[:, :8], expected, rtol=1e-5, atol=2e-4)


def patched(name: str, value) -> type:
    """The policy with another function in place of one of its own."""
    class Patched(TurboQuant):
        def quantise(self, part, rows, packed):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(turboquant, name, value)
                return Read(super().quantise(part, rows, packed and packed.coded), value, name)
    return Patched


class Read:
    """Coded rows that are read with the other function, too."""

    def __init__(self, coded, value, name):
        self.coded, self.value, self.name = coded, value, name

    @property
    def count(self):
        return self.coded.count

    def unpack(self, room=0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(turboquant, self.name, self.value)
            return self.coded.unpack(room)


class Uncorrected(TurboQuant):
    """Wrong: centroids keep the length that rounding gave them."""

    def quantise(self, part, rows, packed):
        return Read(super().quantise(part, rows, packed and packed.coded), 1e9, "TINY")


class ValuesAroundZero(TurboQuant):
    def quantise(self, part, rows, packed):
        largest = rows.abs().amax(-1, keepdim=True)
        return super().quantise(part, torch.cat([rows[..., 1:], -largest], -1) if part == "values" else rows, packed)


def even_levels(d: int, bits: int) -> Tensor:
    return torch.linspace(-2.5, 2.5, 2**bits) * d**-0.5


WRONG = {
    "no rotation": patched("rotated", lambda rows: rows),
    "rotation of halves": patched("rotated", lambda rows: (
        rows.unflatten(-1, (2, -1)) @ turboquant.hadamard(rows.shape[-1] // 2, rows.device)).flatten(-2)),
    "even levels": patched("centroids", even_levels),
    "uncorrected": Uncorrected, "values around zero": ValuesAroundZero,
}


@pytest.mark.oracle("turboquant")
def test_every_format_reads_back_what_vllm_writes():
    check_formats(TurboQuant)


@pytest.mark.refuses("turboquant")
@pytest.mark.parametrize("wrong", WRONG)
def test_another_rule_is_refused(wrong):
    refused(check_formats, WRONG[wrong])


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("count", [1, 7, 8, 32])
def test_codes_are_packed_without_loss(bits, count):
    codes = torch.randint(2**bits, (2, 5, count), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = turboquant.packed(codes, bits)
    assert packed.shape[-1] == turboquant.packed_bytes(count, bits)
    assert torch.equal(turboquant.unpacked(packed, bits, count), codes)


def test_eight_codes_of_three_bits_lie_in_three_bytes_as_in_vllm():
    codes = [1, 2, 3, 4, 5, 6, 7, 0]
    whole = sum(code << 3 * place for place, code in enumerate(codes))
    found = turboquant.packed(torch.tensor([codes], dtype=torch.uint8), 3)
    assert found.tolist() == [list(whole.to_bytes(3, "little"))]


# --- what the rotation is for ---


def loss(keys: Tensor, bits: int) -> float:
    """The mean squared error as a share of the mean square."""
    read = turboquant.RotatedRows.of(keys[None], bits).unpack()[0]
    return float((read - keys).square().sum() / keys.square().sum())


@pytest.mark.parametrize("bits, expected", [(3, 0.03454), (4, 0.009497)])
def test_keys_lose_what_maxs_table_says_even_if_a_channel_is_large_in_all_of_them(bits, expected):
    """2,000 keys of 128 channels: the mean error varies by less than 1 % between samples; the correction of the norm
    changes it by as little.
    """
    keys = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0))
    assert loss(keys, bits) == pytest.approx(expected, rel=0.05)
    keys[:, 5] *= 8
    assert loss(keys, bits) < 2 * expected
    assert plain_loss(keys, bits) > 4 * expected


def plain_loss(keys: Tensor, bits: int) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turboquant, "rotated", lambda rows: rows)
        return loss(keys, bits)


def test_the_rotation_is_its_own_inverse_and_keeps_lengths():
    for d in (1, 8, 24, 96, 128):
        keys = torch.randn(6, d, generator=torch.Generator().manual_seed(d), dtype=torch.float32)
        turned = turboquant.rotated(keys)
        assert torch.allclose(turboquant.rotated(turned), keys, atol=1e-5)
        assert torch.allclose(turned.norm(dim=-1), keys.norm(dim=-1), rtol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_the_norm_of_a_key_stays_and_zeros_and_huge_numbers_stay_finite(format):
    policy = make("turboquant", format=format)
    keys = torch.cat([STRETCHED[:, :2], torch.zeros(2, 1, 32), torch.full((2, 1, 32), 1e9)], 1)
    read = {part: policy.quantise(part, keys, None).unpack() for part in ("keys", "values")}
    assert all(each.isfinite().all() for each in read.values()) and (read["keys"][:, 2] == 0).all()
    norms, near = (each[:, :2].norm(dim=-1) for each in (read["keys"], keys)), 0.05 if format == "k8v4" else 2e-3
    assert torch.allclose(*norms, rtol=near)


# --- bits and layers ---


@pytest.mark.parametrize("format, keys, values", [
    ("k8v4", 8, 5), ("4bit_nc", 4.5, 5), ("k3v4_nc", 3.5, 5), ("3bit_nc", 3.5, 4)
])
def test_the_bits_are_those_of_the_formats(format, keys, values):
    policy, full = make("turboquant", format=format), Full(9, 0, 8, 2, 32, 32)
    assert (policy.quantised_bits("keys", full), policy.quantised_bits("values", full)) == (keys, values)
    for part, bits in (("keys", keys), ("values", values)):
        assert 8 * policy.quantise(part, STRETCHED, None).bytes / STRETCHED.numel() == bits
    assert policy.expected_share(full) == pytest.approx(0.5 + 0.5 * (keys + values) / 64)


def test_the_first_and_last_layers_stay_as_they_are():
    *_, lane = watch(alone(make("turboquant", whole=1)), models(), PROMPT, Limits(0, LENGTH), Draws(0))
    store = lane.target.store
    assert [buffer.quantised_slots > 0 for buffer in store.keys] == [False, True, False]
    assert [buffer.quantised_slots > 0 for buffer in store.values] == [False, True, False]
    assert store.sizes().quantised_slots == store.length


def test_at_most_half_of_the_layers_stay_at_each_end():
    policy = make("turboquant", whole=2)
    assert [policy.quantises_layer(layer, 3) for layer in range(3)] == [False, True, False]
    assert [policy.quantises_layer(layer, 8) for layer in range(8)] == [False] * 2 + [True] * 4 + [False] * 2


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_in_any_format_ends(format):
    assert len(course(alone(make("turboquant", format=format, whole=0)), models())[0]) == 10
