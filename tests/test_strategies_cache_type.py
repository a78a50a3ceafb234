"""Cache types: the formats of ggml, number by number in the order of its reference code, and 8-bit floats."""
from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from playground.contract import Full, make
from strategies.kv_cache import cache_type
from strategies.kv_cache.cache_type import CacheType
from support.budget_policies import roomy
from support.eviction import alone, course, models
from support.packed_caches import rows

COLLAPSES = {"cache_type": roomy("cache_type", recent=1024)}
FORMATS = ("q8_0", "q4_1", "q4_0", "fp8_e4m3")
STRETCHED = rows(2, 9, 64, dtype=torch.float32) * torch.linspace(0.1, 30, 64) + torch.linspace(-3, 3, 9)[:, None]


def half(x: float) -> float:
    return struct.unpack("<e", struct.pack("<e", x))[0]


def single(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def eight_bits(block: list[float]) -> list[float]:
    d = single(max(map(abs, block)) / 127)
    factor = single(1 / d) if d else 0.0
    steps = [single(x * factor) for x in block]
    return [(int(abs(x) + 0.5) * (1 if x > 0 else -1)) * half(d) for x in steps]


def four_bits(block: list[float]) -> list[float]:
    d = single(max(block, key=abs) / -8)
    factor = single(1 / d) if d else 0.0
    return [(min(15, int(single(single(x * factor) + 8.5))) - 8) * half(d) for x in block]


def four_bits_and_a_minimum(block: list[float]) -> list[float]:
    low = min(block)
    d = single((max(block) - low) / 15)
    factor = single(1 / d) if d else 0.0
    codes = [min(15, int(single(single(single(x - low) * factor) + 0.5))) for x in block]
    return [code * half(d) + half(low) for code in codes]


EIGHT_BIT_FLOATS = sorted(
    {sign * (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
     for sign in (1, -1) for exponent in range(16) for mantissa in range(8) if (exponent, mantissa) != (15, 7)}
)


def nearest_float(block: list[float]) -> list[float]:
    return [min(EIGHT_BIT_FLOATS, key=lambda y: abs(y - x)) for x in block]


BY_HAND: dict[str, Callable[[list[float]], list[float]]] = {
    "q8_0": eight_bits, "q4_0": four_bits, "q4_1": four_bits_and_a_minimum, "fp8_e4m3": nearest_float
}


def expected(written: Tensor, format: str) -> Tensor:
    return torch.tensor([[sum((BY_HAND[format](token[at:at + 32]) for at in range(0, len(token), 32)), [])
                          for token in head] for head in written.tolist()])


def check_formats(policy: type[CacheType]) -> None:
    """Keys and values are written token by token after a prompt of five, and read back."""
    for format in FORMATS:
        for part in ("keys", "values"):
            made, packed = policy(format=format, recent=1), None
            for end, count in ((6, 5), (7, 1), (9, 2)):
                done = packed.count if packed else 0
                assert made.quantise_count(part, end - done) == count
                packed = made.quantise(part, STRETCHED[:, done:done + count], packed)
            assert (packed.count, packed.unpack(3).shape) == (8, (2, 11, 64))
            assert torch.allclose(packed.unpack(3)[:, :8], expected(STRETCHED[:, :8], format), rtol=1e-6, atol=1e-6)


class WiderBlocks(CacheType):
    def quantise(self, part, rows, packed):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache_type, "BLOCK", 64)
            return super().quantise(part, rows, packed)


class UnsignedMaximum(CacheType):
    """q4_0 with the magnitude in place of the signed number: the code -8 is used for one sign only."""

    def quantise(self, part, rows, packed):
        right = cache_type.q4_0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache_type, "q4_0", lambda blocks: right(torch.cat(
                [blocks, -blocks.abs().amax(-1, keepdim=True) * 1.0001], -1)))
            patch.setattr(cache_type, "pack_bits", lambda codes, bits: cut(codes, bits, rows.shape[2]))
            return super().quantise(part, rows, packed)


def cut(codes: Tensor, bits: int, d: int) -> Tensor:
    """Codes without the entry that was appended to each block."""
    from playground.algorithms.kv_cache.quantization import pack_bits
    return pack_bits(codes.unflatten(2, (d // 32, -1))[..., :32].flatten(2), bits)


class ScaledToTheMaximum(CacheType):
    """8-bit floats with a scale, as after a calibration."""

    def quantise(self, part, rows, packed):
        return super().quantise(part, rows * 0.9 if self.format == "fp8_e4m3" else rows, packed)


class QuantisesTheRecent(CacheType):
    def quantise_count(self, part, exact):
        return exact


@pytest.mark.oracle("cache_type")
def test_every_format_reads_back_what_its_reference_writes():
    check_formats(CacheType)


@pytest.mark.refuses("cache_type")
@pytest.mark.parametrize("wrong", [WiderBlocks, UnsignedMaximum, ScaledToTheMaximum, QuantisesTheRecent])
def test_a_wrong_format_is_refused(wrong):
    with pytest.raises(AssertionError):
        check_formats(wrong)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("constant", [0.0, 1.0, -0.3, 400.0])
def test_constant_blocks_stay_finite_and_close(format, constant):
    read = make("cache_type", format=format).quantise("keys", torch.full((1, 3, 40), constant), None).unpack()
    assert read.shape == (1, 3, 40) and (read - constant).abs().max() <= abs(constant) / 16


def test_numbers_beyond_the_range_of_eight_bit_floats_saturate():
    read = make("cache_type", format="fp8_e4m3").quantise("keys", torch.tensor([[[500.0, -1e9]]]), None).unpack()
    assert read.flatten().tolist() == [448, -448]


@pytest.mark.parametrize("format, bits", [("q8_0", 8.5), ("q4_1", 5), ("q4_0", 4.5), ("fp8_e4m3", 8)])
def test_the_bits_are_those_of_the_formats(format, bits):
    policy = make("cache_type", format=format)
    coded = policy.quantise("keys", STRETCHED, None)
    assert policy.quantised_bits("keys", Full(9, 0, 1, 2, 64, 32)) == bits == 8 * coded.bytes / STRETCHED.numel()


def test_values_may_have_a_format_of_their_own():
    policy, full = make("cache_type", format="q8_0", value_format="exact"), Full(9, 0, 1, 2, 64, 32)
    assert (policy.quantise_count("keys", 9), policy.quantise_count("values", 9)) == (9, 0)
    assert policy.expected_share(full) == pytest.approx((8.5 / 32 + 1) / 2)
    assert make("cache_type", format="q8_0", value_format="q4_0").quantised_bits("values", full) == 4.5


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_in_any_format_ends(format):
    assert len(course(alone(make("cache_type", format=format)), models())[0]) == 10
