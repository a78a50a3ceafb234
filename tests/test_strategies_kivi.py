"""Cache policies that quantise rows: their error, the memory they save, and when they quantise."""
from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from pairs import pair
from registry import unchanged_by
from tables import watch, write
from torch.nn.functional import pad

from playground.algorithms.kv_cache.quantization import Quantised, group_size, pack_bits, quantise, unpack_bits
from playground.contract import make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.events import Cache
from strategies.kv_cache.kivi import Kivi
from support.packed_caches import LENGTH, PROMPT, models, rows

COLLAPSES = {"kivi": unchanged_by("kivi", residual=1024)}


# --- bit packing ---

@pytest.mark.parametrize(
    "codes, bits, packed",
    [
        ([1, 2, 3, 0], 2, [0b00111001]),
        ([1, 2, 3, 0, 2], 2, [0b00111001, 0b10]),
        ([9, 4], 4, [0x49]),
        ([200, 7], 8, [200, 7]),
        ([1, 0, 1], 1, [0b101]),
    ],
)
def test_codes_share_bytes_the_first_in_the_lowest_bits(codes, bits, packed):
    assert pack_bits(torch.tensor(codes, dtype=torch.uint8), bits).tolist() == packed


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8, 21])
def test_codes_survive_packing(bits, count):
    codes = torch.randint(0, 2 ** bits, (2, 5, count), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (2, 5, -(-count * bits // 8)) and packed.dtype == torch.uint8
    assert torch.equal(unpack_bits(packed, bits, count), codes)


# --- quantisation ---

@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axis, size", [(1, 8), (1, 24), (2, 8), (2, 4), (2, 1)])
@pytest.mark.parametrize("place, spread", [(0, 1.0), (50, 1.0), (-300, 0.1), (0, 1e-6), (1000, 300.0)])
def test_no_value_is_off_by_more_than_half_a_step_of_its_group(bits, axis, size, place, spread):
    written = rows() * spread + place
    packed = quantise(written, bits, axis, size)
    steps = packed.scale.double().repeat_interleave(size, axis)
    assert ((packed.unpack() - written).abs() <= steps / 2 * (1 + 1e-9)).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axis", [1, 2])
def test_the_step_is_close_to_the_range_of_the_group(bits, axis):
    """The zero point is rounded to half precision, so a narrow group far from 0 has slightly larger steps."""
    written = rows() + torch.linspace(-3, 3, 8)
    groups = written.unflatten(axis, (-1, 8))
    ideal = (groups.amax(axis + 1) - groups.amin(axis + 1)) / (2 ** bits - 1)
    slack = groups.abs().amax(axis + 1) * 2 ** -9 / (2 ** bits - 1)
    scale = quantise(written, bits, axis, 8).scale.double()
    assert (scale >= ideal).all() and (scale <= (ideal + slack) * (1 + 2 ** -9)).all()


def by_hand(written: torch.Tensor, bits: int) -> torch.Tensor:
    """One group [n] by the definition, in exact arithmetic."""
    step = (written.max() - written.min()) / (2 ** bits - 1)
    return written.min() + step * ((written - written.min()) / step).round()


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_equal_their_definition(bits):
    written = rows(1, 16, 4)
    keys = torch.stack([by_hand(written[0, :, channel], bits) for channel in range(4)], 1)
    values = torch.stack([by_hand(written[0, token], bits) for token in range(16)])
    assert (quantise(written, bits, 1, 16).unpack()[0] - keys).abs().max() < 0.02
    assert (quantise(written, bits, 2, 4).unpack()[0] - values).abs().max() < 0.02
    assert (quantise(written, bits, 2, 4).unpack()[0] - keys).abs().max() > 0.1


@pytest.mark.parametrize("constant", [0.0, 1.0, -0.3, 1e-7, 7e4, -1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_constant_group_is_decoded_exactly(constant, dtype):
    written = torch.full((1, 8, 8), constant, dtype=dtype)
    read = quantise(written, 2, 1, 8).unpack()
    assert read.isfinite().all() and read.dtype == dtype
    if abs(constant) < 6e4:  # beyond the range of half precision
        assert (read - written).abs().max() <= abs(constant) * 2 ** -7 + 2 ** -22


def test_rows_packed_separately_equal_rows_packed_together():
    written = rows()
    for axis in (1, 2):
        parts = [quantise(part, 4, axis, 8) for part in written.split(8, 1)]
        assert torch.equal(parts[0].concat(parts[1]).concat(parts[2]).unpack(), quantise(written, 4, axis, 8).unpack())


@pytest.mark.parametrize(
    "whole, wanted, size", [(64, 32, 32), (80, 32, 20), (24, 32, 24), (8, 32, 8), (7, 4, 1), (7, 32, 7)]
)
def test_groups_shrink_until_they_divide_the_axis(whole, wanted, size):
    assert group_size(whole, wanted) == size


# --- when, and how much ---

@dataclass
class Held:
    """What the target of a lane holds after a commit."""

    length: int
    keys: Quantised | None
    values: Quantised | None


def course(policy: Kivi, decoder: str = "greedy", architecture: str = "llama") -> list[Held]:
    found = []
    for lane in watch(
        Assembly(make(decoder), cache_policy=policy), models(architecture), PROMPT, Limits(0, LENGTH), Draws(0)
    ):
        if lane.generated:
            store = lane.target.store
            found.append(Held(store.length, store.keys[1].quantised_rows, store.values[1].quantised_rows))
    return found


@pytest.mark.parametrize("decoder", ["greedy", "speculative"])
def test_keys_are_quantised_by_full_residuals_and_values_token_by_token(decoder):
    settled = [held for held in course(make("kivi", residual=8, group=8), decoder) if held.keys]
    assert len({held.length for held in settled}) > 3
    for held in settled[-1:] + [a for a, b in zip(settled, settled[1:]) if a.length < b.length]:
        assert held.keys.count == held.length - held.length % 8
        assert held.values.count == held.length - 8


def test_quantised_rows_are_never_quantised_again():
    settled = [held for held in course(make("kivi", residual=8, group=8)) if held.keys]
    for earlier, later in zip(settled, settled[1:]):
        for a, b in ((earlier.keys, later.keys), (earlier.values, later.values)):
            assert torch.equal(a.unpack(), b.unpack()[:, :a.count])
    assert settled[-1].keys.count > settled[0].keys.count


def test_keys_share_their_scale_along_tokens_and_values_along_channels():
    last = course(make("kivi", residual=16, group=8))[-1]
    assert last.keys.scale.shape == (2, last.keys.count // 8, 8)
    assert last.values.scale.shape == (2, last.values.count, 1)


class KeysByTheToken(Kivi):
    """One scale per token for keys too, although some key channels are large in every token."""

    def quantise(self, part, rows, packed):
        return super().quantise("values", rows, packed)


class ValuesWaitForABlock(Kivi):
    """Quantises values in blocks, like keys."""

    def quantise_count(self, part, exact):
        return super().quantise_count("keys", exact)


class RecentValuesArePackedToo(Kivi):
    def quantise_count(self, part, exact):
        return exact if part == "values" else super().quantise_count(part, exact)


class LevelsAreCutOff(Kivi):
    """Rounds down instead of to the nearest level."""

    def quantise(self, part, rows, packed):
        axis = 1 if part == "keys" else 2
        groups = rows.unflatten(axis, (-1, 8))
        half = (groups.amax(axis + 1, keepdim=True) - groups.amin(axis + 1, keepdim=True)) / 6
        coded = super().quantise(
            part, (groups - half).clamp(min=groups.amin(axis + 1, keepdim=True)).flatten(axis, axis + 1), None
        )
        return packed.concat(coded) if packed else coded


def read_back(policy: Kivi, part: str, written: torch.Tensor, prompt: int) -> tuple[int, torch.Tensor]:
    """How many rows [heads, n, d] are packed once they were written one after another behind a prompt, and what is read
    of those.
    """
    packed, count = None, 0
    for length in range(prompt, written.shape[1] + 1):
        more = policy.quantise_count(part, length - count)
        packed = policy.quantise(part, written[:, count:count + more], packed) if more else packed
        count += more
    return count, packed.unpack()


def groups_of(part: str, head: torch.Tensor, size: int) -> list[tuple[slice | int, slice | int]]:
    """The slices of the groups of a head [n, d]: `size` tokens of a key channel, `size` channels of a token's values.
    """
    tokens, channels = head.shape
    if part == "keys":
        return [(slice(at, at + size), channel) for channel in range(channels) for at in range(0, tokens, size)]
    return [(token, slice(at, at + size)) for token in range(tokens) for at in range(0, channels, size)]


def check_kivi(policy: type[Kivi]) -> None:
    """Every value is decoded as the nearest of the four evenly spaced levels of its group, and recent ones are not
    packed.
    """
    written = rows(2, 37, 16) + 6 * rows(2, 1, 16, seed=3)  # channels with different offsets
    for part, expected in (("keys", 32), ("values", 29)):
        count, read = read_back(policy(bits="2", group=8, residual=8), part, written, prompt=20)
        assert count == expected
        for before, after in zip(written[:, :count], read):
            for group in groups_of(part, before, 8):
                low, high = float(before[group].min()), float(before[group].max())
                levels = torch.tensor([low + (high - low) * code / 3 for code in range(4)])
                assert ((after[group][:, None] - levels).abs().amin(1) < 0.03).all()
                assert ((after[group] - before[group]).abs() <= (high - low) / 6 + 0.03).all()


@pytest.mark.oracle("kivi")
def test_quantised_values_are_the_nearest_levels_of_their_group():
    check_kivi(Kivi)


@pytest.mark.refuses("kivi")
@pytest.mark.parametrize(
    "wrong",
    [KeysByTheToken, ValuesWaitForABlock, RecentValuesArePackedToo, LevelsAreCutOff],
    ids=lambda cls: cls.__name__,
)
def test_a_wrong_quantised_cache_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_kivi(wrong)


@pytest.mark.parametrize("bits, group, residual", [("2", 8, 8), ("4", 32, 16), ("8", 8, 24)])
def test_memory_decreases_by_the_formula_and_buffers_free_it(bits, group, residual):
    knobs = dict(bits=bits, group=group, residual=residual)
    text = "The green bird sings, and the red fox listens. " * 3
    configs = LaneConfig("greedy"), LaneConfig("greedy", {}, [("kivi", knobs)])
    full, packed = (prepare(pair("gpt2"), [config], Prompt(text), Limits(max_new_tokens=12)) for config in configs)
    caches, baseline = (
        [stamped.event for stamped in session if isinstance(stamped.event, Cache)] for session in (packed, full)
    )
    for cache, plain in zip(caches, baseline):
        assert cache.packed == cache.length - cache.length % residual
        assert plain.bytes == 2 * cache.layers * cache.heads * cache.length * 64
        assert cache.bytes == cache.layers * cache.heads * computed(cache.length, int(bits), group, residual)
    assert caches[0].bytes < baseline[0].bytes / 2 and len(caches) == len(baseline) == 13
    capacities = [
        sum(pool.rows.nbytes for pool in session._runners[0].lane.target.store.keys) for session in (packed, full)
    ]
    assert capacities[0] < capacities[1]


def computed(length: int, bits: int, group: int, residual: int) -> int:
    """Bytes of one head of 8 channels of 8 bytes: rows as written, codes, and two constants of two bytes for each
    group.
    """
    exact = length % residual + residual
    keys, values = length - length % residual, length - residual
    constants = keys // group_size(residual, group) * 8 + values * 8 // min(group, 8)
    return exact * 8 * 8 + (keys + values) * bits + 4 * constants


# --- effect on the text ---

class Whole(Kivi):
    """The same schedule with a lossless encoding."""

    def quantise(self, part, rows, packed):
        return Verbatim(torch.cat([packed.rows, rows], 1) if packed else rows.clone())


@dataclass
class Verbatim:
    rows: torch.Tensor

    @property
    def count(self) -> int:
        return self.rows.shape[1]

    @property
    def bytes(self) -> int:
        return self.rows.nbytes

    def unpack(self, room: int = 0) -> torch.Tensor:
        return pad(self.rows, (0, 0, 0, room))


def text(policy: Kivi | None, decoder: str, architecture: str = "llama") -> list[int]:
    assembly = Assembly(make(decoder), cache_policy=policy)
    return write(assembly, models(architecture), PROMPT, Limits(0, LENGTH), Draws(0)).tokens


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("decoder", ["greedy", "speculative"])
def test_lossless_packing_changes_nothing(architecture, decoder):
    plain = text(None, decoder, architecture)
    assert text(Whole(residual=8), decoder, architecture) == plain


def off(bits: str, architecture: str) -> float:
    """Mean error of the quantised keys of a lane."""
    policies = Whole(residual=8), make("kivi", bits=bits, residual=8)
    exact, packed = (course(policy, architecture=architecture)[0].keys for policy in policies)
    return float((packed.unpack() - exact.unpack()).abs().mean())


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_more_bits_reduce_the_error(architecture):
    two, four, eight = (off(bits, architecture) for bits in ("2", "4", "8"))
    assert two > 3 * four > 30 * eight > 0


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_two_bits_change_the_text_of_a_random_model_and_leave_it_finite(architecture):
    found = text(make("kivi", bits="2", residual=8), "greedy", architecture)
    assert len(found) == len(PROMPT) + LENGTH
    assert found != text(None, "greedy", architecture)


@pytest.mark.parametrize("bits", ["2", "4", "8"])
def test_head_dimensions_without_a_fitting_group_are_quantised_too(bits):
    policy = make("kivi", bits=bits, group=32, residual=40)
    for part in ("keys", "values"):
        written = rows(2, 40, 7)
        packed = policy.quantise(part, written, None)
        assert (packed.unpack() - written).abs().max() < 4 / (2 ** int(bits) - 1)
        assert packed.codes.shape[2] == -(-7 * int(bits) // 8)
