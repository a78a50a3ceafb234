"""Compressed caches, in memory or as a stream: error correction, pruning, and bytes."""
from __future__ import annotations

import itertools
import math

import numpy
import pytest
import torch
from pairs import pair
from torch import Tensor

from playground.algorithms.kv_cache.quantization import group_size, quantise
from playground.contract import make
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Figure
from playground.trace import check
from strategies.kv_cache.gear import Gear, find_outliers, low_rank
from strategies.kv_cache.mustafar import sparse
from support.budget_policies import roomy
from support.coded_caches import TEXT, course, norm, packed
from support.packed_caches import PROMPT, rows
from support.wrong_variants import variants_of

COLLAPSES = {
    "gear": roomy("gear", buffer=1024),
    "mustafar": roomy("mustafar", window=1024) + roomy("mustafar", key_zeros=0.0, value_zeros=0.0, window=0),
}


# --- low-rank matrices ---

def decaying(seed: int = 0) -> Tensor:
    """Two heads of errors [2, 40, 12] whose singular values decrease by a third each."""
    bases = [
        torch.linalg.qr(torch.randn(2, n, 12, generator=torch.Generator().manual_seed(seed + n), dtype=torch.float64)).Q
        for n in (40, 12)
    ]
    return bases[0] * 0.67 ** torch.arange(12) @ bases[1].mT


def left_after(error: Tensor, rank: int, rounds: int = 3) -> float:
    left, right = low_rank(error, rank, rounds)
    return norm(error - left.double() @ right.double().mT)


@pytest.mark.parametrize("rank", range(1, 9))
def test_the_low_rank_residual_is_close_to_the_optimum(rank):
    error = decaying()
    least = norm(torch.linalg.svdvals(error)[:, rank:])
    assert least <= left_after(error, rank) * (1 + 1e-9) and left_after(error, rank) < 1.06 * least + 2e-3 * norm(error)


def test_more_columns_or_iterations_reduce_the_residual_and_full_rank_removes_it():
    error = decaying(5)
    by_rank = [left_after(error, rank) for rank in (0, 1, 2, 4, 8)]
    assert by_rank == sorted(by_rank, reverse=True) and by_rank[0] == pytest.approx(norm(error))
    assert left_after(error, 3, rounds=1) > left_after(error, 3, rounds=2) > left_after(error, 3, rounds=8)
    assert left_after(error, 16) < 2e-3 * norm(error)


def test_tiny_errors_are_corrected_as_well_as_large_ones_deterministically():
    error = decaying() * 1e-3
    assert left_after(error, 4, rounds=8) < 0.3 * norm(error)
    first, again = low_rank(error, 4, 3), low_rank(error, 4, 3)
    assert all(torch.equal(a, b) and a.dtype == torch.float16 for a, b in zip(first, again))
    assert all(part.isfinite().all() for part in low_rank(torch.zeros(2, 8, 8), 4, 3))


# --- outliers ---

@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.25, 1.0])
def test_the_extremes_of_every_vector_are_stored_exactly(part, share):
    written = rows(2, 24, 8)
    outliers = find_outliers(part, written, share)
    length = 24 if part == "keys" else 16
    assert outliers.numbers.shape[-1] == 2 * int(share * length / 2) and outliers.places.dtype == torch.int16
    found = outliers.restore(torch.zeros_like(written))
    for vector, kept in zip(by_vector(part, written), by_vector(part, found)):
        count = int(share * length / 2)
        ends = [*vector.sort().values[:count].tolist(), *vector.sort().values[length - count:].tolist()]
        assert sorted(kept[kept != 0].tolist()) == ends
    assert share < 1 or torch.equal(found, written)


def by_vector(part: str, written: Tensor) -> list[Tensor]:
    if part == "keys":
        return [written[head, :, channel] for head in range(written.shape[0]) for channel in range(written.shape[2])]
    return [written[:, token].flatten() for token in range(written.shape[1])]


@pytest.mark.parametrize("part", ["keys", "values"])
def test_replacing_an_outlier_by_the_mean_does_not_widen_the_scale(part):
    written = rows(2, 24, 8)
    written[0, 3, 2], axis = 50.0, 1 if part == "keys" else 2
    shares = (0.0, 0.2, 0.3)
    steps = [
        quantise(find_outliers(part, written, share).replaced(written), 2, axis, 8).scale.double() for share in shares
    ]
    assert steps[0].max() > 10 and max(float(step.max()) for step in steps[1:]) < 2


# --- blocks, and when they are compressed ---

@pytest.mark.parametrize("part", ["keys", "values"])
def test_blocks_are_decoded_consecutively_with_capacity_after_the_last(part):
    gear, written = make("gear", buffer=8), torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(3))
    blocks = gear.quantise(part, written[:, 24:], gear.quantise(part, written[:, :24], None))
    assert len(blocks.blocks) == 3
    found = blocks.unpack(room=5)
    assert found.shape == (2, 45, 16) and torch.equal(
        found[:, :40], torch.cat([block.unpack() for block in blocks.blocks], 1)
    )


@pytest.mark.parametrize("part", ["keys", "values"])
def test_outliers_and_low_rank_each_lower_the_error_and_without_both_it_is_the_quantised_cache(part):
    written = rows(2, 64, 8)
    written[:, :, 3] += 5 * rows(2, 64, 1, seed=1)[..., 0] ** 3  # a channel of keys with outliers
    plain = packed(part, written, outliers=0.0, rank=0)
    axis = 1 if part == "keys" else 2
    assert torch.equal(plain.unpack(), quantise(written, 2, axis, group_size(written.shape[axis], 64)).unpack())
    errors = [
        norm(packed(part, written, outliers=share, rank=rank).unpack() - written)
        for share, rank in ((0, 0), (0.1, 0), (0.1, 2), (0.1, 4), (0.1, 8))
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 2e-3 * norm(written) < errors[0]


@pytest.mark.parametrize("part", ["keys", "values"])
def test_reported_bytes_equal_stored_bytes_and_the_formula(part):
    heads, n, d = 2, 64, 16
    block = packed(part, rows(heads, n, d), bits="2", group=16, outliers=0.1, rank=3)
    outliers = heads * d * 2 * int(0.05 * n) if part == "keys" else n * 2 * int(0.05 * heads * d)
    assert block.bytes == heads * n * d // 4 + heads * n * d // 16 * 4 + outliers * (8 + 2) + heads * 3 * (n + d) * 2


@pytest.mark.parametrize("decoder", ["greedy", "speculative"])
def test_blocks_are_compressed_at_the_buffer_size_and_never_changed_again(decoder):
    settled = course(make("gear", buffer=8), decoder)
    for held in settled:
        whole = held.length - held.length % 8
        assert held.keys.count == held.values.count == whole
        assert [block.codes.count for block in held.keys.blocks] == [len(PROMPT) - len(PROMPT) % 8] + [8] * (
            (whole - len(PROMPT)) // 8
        )
    for earlier, later in itertools.pairwise(settled):
        assert all(a is b for a, b in zip(earlier.keys.blocks, later.keys.blocks))
    ranks = [block.factors[0].shape[2] for block in settled[-1].keys.blocks]
    assert ranks == [4, 2] and settled[0].keys.count < settled[-1].keys.count


def test_the_buffer_holds_exact_states():
    exact, ours = course(make("gear", buffer=1024))[0], course(make("gear", buffer=16))[0]
    for whole, held in zip(exact.rows, ours.rows):
        assert torch.equal(whole[:, 16:], held[:, 16:]) and not torch.equal(whole[:, :16], held[:, :16])


class FitsTheRowsThemselves(Gear):
    def _block(self, part, written, rank):
        block = super()._block(part, written, rank)
        return type(block)(block.codes, block.outliers, low_rank(written, rank, self.rounds))


class LeavesOutliersInTheScale(Gear):
    def _block(self, part, written, rank):
        block = super()._block(part, written, rank)
        return type(block)(self._quantised(part, written), block.outliers, block.factors)


class KeysByTheToken(Gear):
    def _quantised(self, part, written):
        return super()._quantised("values", written)


def gear_error_by_definition(keys: Tensor, bits: int, group: int, share: float, rank: int) -> float:
    """Norm of the error of keys [heads, n, d]: numpy alone, groups one by one, and the best matrix of that rank in
    place of power iteration.
    """
    missed = 0.0
    for head in keys.numpy():
        left = numpy.zeros_like(head)
        for channel, column in enumerate(head.T):
            order, count = column.argsort(), int(share * len(column) / 2)
            outliers = numpy.concatenate([order[:count], order[len(order) - count:]])
            whole = column.copy()
            whole[outliers] = column.mean()
            for start in range(0, len(whole), group):
                part = whole[start:start + group]
                step = (part.max() - part.min()) / (2 ** bits - 1)
                left[start:start + group, channel] = part - part.min() - step * numpy.rint((part - part.min()) / step)
            left[outliers, channel] = 0
        missed += float((numpy.linalg.svd(left, compute_uv=False)[rank:] ** 2).sum())
    return math.sqrt(missed)


def check_gear(policy: type[Gear]) -> None:
    """The error of a block of keys is that of the definition: 5 % are left for half precision and for power iteration.
    """
    written = rows(2, 64, 8) + 8 * rows(2, 1, 8, seed=2)  # channels with different offsets, as keys have
    written[:, 5, 3] += 30
    error = norm(policy(bits="2", group=16, outliers=0.1, rank=3).quantise("keys", written, None).unpack() - written)
    assert error == pytest.approx(gear_error_by_definition(written, 2, 16, 0.1, 3), rel=0.05)


@pytest.mark.oracle("gear")
def test_the_error_of_a_corrected_block_equals_its_definition():
    check_gear(Gear)


@pytest.mark.refuses("gear")
@pytest.mark.parametrize("wrong", variants_of(Gear, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_correction_has_another_error(wrong):
    with pytest.raises(AssertionError):
        check_gear(wrong)


@pytest.mark.parametrize("wrong", variants_of(Gear, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_recipe_corrects_less(wrong):
    written = rows(2, 64, 8) + 8 * rows(2, 1, 8, seed=2)  # channels with different offsets, as keys have
    written[:, 5, 3] += 30
    right, ours = (
        norm(policy.quantise("keys", written, None).unpack() - written)
        for policy in (Gear(outliers=0.1), wrong(outliers=0.1))
    )
    assert ours > 1.2 * right


def test_a_lane_reports_the_error_of_each_block():
    session = prepare(
        pair(),
        [LaneConfig("greedy", {}, [("gear", {"buffer": 16, "outliers": 0.1})])],
        Prompt(TEXT),
        Limits(max_new_tokens=24),
    )
    figures = [stamped.event for stamped in session if isinstance(stamped.event, Figure)]
    assert check(session.trace) == []
    errors = [list(figure.data["series"].values()) for figure in figures if figure.name.startswith("error")]
    assert len(errors) >= 4 and all(bare >= kept > repaired > 0 for bare, kept, repaired in errors)
    assert {figure.data["x"] for figure in figures} == set(range(len(errors) // 2))


@pytest.mark.parametrize(
    "make_form",
    [
        lambda part, written: quantise(written, 2, 1 if part == "keys" else 2, 8),
        packed,
        lambda part, written: sparse(written, 5),
        lambda part, written: Gear(buffer=8, group=8).quantise(
            part, written[:, 8:], Gear(buffer=8, group=8).quantise(part, written[:, :8], None)
        ),
    ],
    ids=["quantised", "repaired", "sparse", "two blocks"],
)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_spare_capacity_does_not_change_decoded_rows(part, make_form):
    held = make_form(part, rows(2, 16, 8))
    alone, roomy = held.unpack(), held.unpack(3)
    assert alone.shape == (2, 16, 8) and roomy.shape == (2, 19, 8)
    assert torch.equal(roomy[:, :16], alone) and held.unpack(3).data_ptr() != roomy.data_ptr()
