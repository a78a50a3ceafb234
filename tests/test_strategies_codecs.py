"""Compressed caches, in memory or as a stream: error correction, pruning, and bytes."""
from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy
import pytest
import torch
from pairs import pair
from tables import watch, write
from torch import Tensor

from playground.algorithms.kv_cache.quantization import group_size, quantise, unpack_bits
from playground.contract import CachePolicy, make
from playground.contract.lane_config import Assembly, LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.decoding.session import Prompt, prepare
from playground.events import Cache, Figure
from playground.trace import check
from strategies.kv_cache.cachegen import CacheGen, binned, pack, unpack
from strategies.kv_cache.cachegen.entropy_coding import TOTAL, decode, encode, tables
from strategies.kv_cache.gear import Blocks, Gear, find_outliers, low_rank
from strategies.kv_cache.mustafar import Mustafar, Sparse, sparse
from support.budget_policies import TREE, roomy
from support.packed_caches import LENGTH, PROMPT, models, rows
from support.wrong_variants import variants_of

TEXT = "The green bird sings, and the red fox listens. " * 3
COLLAPSES = {
    "gear": roomy("gear", buffer=1024),
    "mustafar": roomy("mustafar", window=1024) + roomy("mustafar", key_zeros=0.0, value_zeros=0.0, window=0),
}


@dataclass
class Held:
    """What the first layer of a lane's target holds after a commit."""

    length: int
    keys: object
    values: object
    rows: tuple[Tensor, Tensor]  # keys and values as attention receives them


def course(policy: CachePolicy, decoder: str = "greedy", architecture: str = "llama") -> list[Held]:
    found = []
    for lane in watch(
        Assembly(make(decoder), cache_policy=policy), models(architecture), PROMPT, Limits(0, LENGTH), Draws(0)
    ):
        store = lane.target.store
        if lane.generated and not (found and found[-1].length == store.length):
            read = tuple(pools[0].read(store.length) for pools in (store.keys, store.values))
            found.append(
                Held(
                    store.length,
                    store.keys[0].quantised_rows,
                    store.values[0].quantised_rows,
                    tuple(part.clone() for part in read),
                )
            )
    return found


def text(policy: CachePolicy | None, decoder: str = "greedy") -> list[int]:
    return write(Assembly(make(decoder), cache_policy=policy), models(), PROMPT, Limits(0, LENGTH), Draws(0)).tokens


def norm(x: Tensor) -> float:
    return float(x.norm())


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

def packed(part: str, written: Tensor, **knobs) -> Blocks:
    return make("gear", **knobs).quantise(part, written, None)


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


# --- pruning ---

@pytest.mark.parametrize("zeros", [0, 1, 4, 7])
def test_no_row_with_as_many_zeros_has_a_smaller_error(zeros):
    written = rows(1, 5, 8)
    read = sparse(written, zeros).unpack()
    for row, kept in zip(written[0], read[0]):
        others = [
            row.index_fill(0, torch.tensor(gone, dtype=torch.long), 0)
            for gone in itertools.combinations(range(8), zeros)
        ]
        assert norm(row - kept) == pytest.approx(min(norm(row - other) for other in others))
        assert int((kept == 0).sum()) == zeros and torch.equal(kept[kept != 0], row[kept != 0])


@pytest.mark.parametrize("d, share, counting, zeros", [
    (8, 0.5, "exact", 4), (8, 0.7, "exact", 5), (10, 0.7, "exact", 7), (64, 0.95, "exact", 60), (8, 0.0, "exact", 0),
    (8, 0.5, "released", 3), (8, 0.0, "released", 0),
])
def test_the_share_gives_the_number_of_pruned_values_and_one_fewer_as_released(d, share, counting, zeros):
    policy = make("mustafar", key_zeros=share, value_zeros=0.3, counting=counting)
    assert policy.zeros("keys", d) == zeros
    assert policy.zeros("values", 10) == {"exact": 3, "released": 2}[counting]


def test_of_equal_values_those_of_lower_channels_are_pruned():
    assert sparse(torch.tensor([[[2.0, -2.0, 2.0, -2.0]]]), 2).unpack().tolist() == [[[0, 0, 2, -2]]]


def test_an_attention_score_changes_by_at_most_the_query_times_the_pruned_values():
    written, query = rows(2, 24, 8), rows(2, 1, 8, seed=1)
    removed = written - sparse(written, 5).unpack()
    assert ((query * removed).sum(-1).abs() <= query.norm(dim=-1) * removed.norm(dim=-1) + 1e-12).all()


@pytest.mark.parametrize("decoder", ["greedy", "speculative"])
def test_the_newest_rows_are_exact_and_older_ones_are_pruned_once(decoder):
    settled = course(make("mustafar", window=6, key_zeros=0.5, value_zeros=0.75), decoder)
    for held in settled:
        for part, zeros in zip(held.rows, (4, 6)):
            found = (part == 0).sum(-1)
            assert (found[:, :held.length - 6] == zeros).all() and (found[:, held.length - 6:] == 0).all()
    for earlier, later in itertools.pairwise(settled):
        for before, after in zip(earlier.rows, later.rows):
            old, left = earlier.length - 6, later.length - 6
            assert torch.equal(before[:, :old], after[:, :old]) and torch.equal(
                before[:, left:], after[:, left : earlier.length]
            )


def test_nothing_is_pruned_during_the_prefill():
    ours, plain = text(make("mustafar", window=0)), text(None)
    assert ours[len(PROMPT)] == plain[len(PROMPT)] and ours != plain


@pytest.mark.parametrize("share, d", [(0.7, 8), (0.0, 8), (0.95, 8)])
def test_bytes_are_one_bit_per_channel_plus_the_remaining_values(share, d):
    knobs = {"window": 5, "key_zeros": share, "value_zeros": share}
    session = prepare(pair(), [LaneConfig("greedy", {}, [("mustafar", knobs)])], Prompt(TEXT), Limits(max_new_tokens=6))
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    held = d - int(share * d + 1e-9)
    for cache in caches:
        heads = 2 * cache.layers * cache.heads
        assert cache.bytes == heads * ((cache.length - 5) * (d // 8 + 8 * held) + 5 * d * 8)
    assert (caches[-1].bytes < 2 * caches[-1].layers * caches[-1].heads * caches[-1].length * d * 8) == (share > 0)


def test_bitmaps_of_any_width_are_decoded_exactly():
    pruned = sparse(rows(2, 4, 11), 3)
    assert pruned.places.shape == (2, 4, 2) and unpack_bits(pruned.places, 1, 11).sum(-1).tolist() == [[8] * 4] * 2
    assert isinstance(pruned.concat(pruned), Sparse) and torch.equal(
        pruned.concat(pruned).unpack()[:, 4:], pruned.unpack()
    )


class LargeOnesGo(Mustafar):
    def quantise(self, part, written, packed):
        return super().quantise(part, 1 / written, packed)


class OneShareForBoth(Mustafar):
    def zeros(self, part, d):
        return super().zeros("keys", d)


class TheWindowIsPrunedToo(Mustafar):
    def quantise_count(self, part, exact):
        return exact


class PrunedOverAndOver(Mustafar):
    def quantise(self, part, written, packed):
        return super().quantise(part, torch.cat([packed.unpack() * 0.99, written], 1) if packed else written, None)


def pruned_by_definition(written: Tensor, zeros: int) -> Tensor:
    """Rows [heads, n, d] without the `zeros` numbers of each that are nearest to 0, found by sorting each row."""
    pruned = written.clone()
    for row in pruned.flatten(0, 1):
        for channel in sorted(range(len(row)), key=lambda channel: abs(float(row[channel])))[:zeros]:
            row[channel] = 0
    return pruned


def check_mustafar(policy: type[Mustafar]) -> None:
    """What the first layer reads: the prompt's rows as the definition prunes them, and none of them pruned a second
    time later on.
    """
    settled, length = course(policy(window=6, key_zeros=0.5, value_zeros=0.75)), len(PROMPT)
    exact = course(make("mustafar", window=1024))[0].rows
    for read, last, whole, zeros in zip(settled[0].rows, settled[-1].rows, exact, (4, 6)):
        assert torch.equal(read, torch.cat([pruned_by_definition(whole[:, :-6], zeros), whole[:, -6:]], 1))
        assert torch.equal(last[:, :length], pruned_by_definition(whole, zeros))


@pytest.mark.oracle("mustafar")
def test_old_rows_lose_their_smallest_values_and_recent_ones_none():
    check_mustafar(Mustafar)


@pytest.mark.refuses("mustafar")
@pytest.mark.parametrize("wrong", variants_of(Mustafar, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_pruning_rule_is_detected(wrong):
    with pytest.raises(AssertionError):
        check_mustafar(wrong)


@pytest.mark.parametrize("name, knobs", [("gear", {"buffer": 8}), ("mustafar", {"window": 4})])
@pytest.mark.parametrize("recipe", [LaneConfig("greedy"), TREE], ids=["greedy", "tree"])
def test_traces_of_lanes_with_these_caches_are_consistent(name, knobs, recipe):
    lane = LaneConfig(recipe.strategy, recipe.knobs, [*recipe.extras, (name, knobs)])
    session = prepare(pair(), [lane], Prompt(TEXT), Limits(max_new_tokens=10))
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    assert check(session.trace) == [] and all(cache.packed > 0 and cache.evicted == 0 for cache in caches)


# --- entropy coding ---

def symbols(kinds: int, n: int, streams: int, seed: int = 0) -> numpy.ndarray:
    """Streams of symbols [n, streams], each with its own probabilities: some nearly uniform, some almost deterministic.
    """
    chance = numpy.random.default_rng(seed)
    return numpy.stack(
        [chance.choice(kinds, n, p=chance.dirichlet(numpy.full(kinds, 3.0 ** -(i % 5)))) for i in range(streams)], 1
    )


def entropy_of(stream: numpy.ndarray) -> float:
    """Entropy of a stream in bits, by its own statistics."""
    counts = numpy.bincount(stream)
    return -sum(count * math.log2(count / len(stream)) for count in counts.tolist() if count)


STREAMS = [
    symbols(15, 300, 20),
    symbols(2, 1, 3),
    symbols(63, 40, 6),
    numpy.full((100, 4), 7),
    numpy.zeros((1, 1), numpy.int64),
    symbols(11, 1000, 3, seed=4),
]


@pytest.mark.parametrize("written", STREAMS, ids=lambda written: str(written.shape))
def test_every_symbol_is_decoded_exactly(written):
    starts = tables(written, 64)
    assert (numpy.diff(starts) > 0).all() and (starts[:, -1] == TOTAL).all()
    assert (decode(*encode(written, starts), starts, len(written)) == written).all()


@pytest.mark.parametrize("kinds, n", [(15, 2000), (31, 2000), (3, 500)])
def test_the_stream_length_equals_its_entropy_up_to_the_final_state(kinds, n):
    """32 bits of state, of which 16 are there from the start, and words of 16 bits."""
    written = symbols(kinds, n, 12, seed=kinds)
    _, counts, words = encode(written, tables(written, kinds))
    assert counts.sum() == len(words)
    for stream, count in zip(written.T, counts.tolist()):
        assert entropy_of(stream) - 16 <= 16 * count + 16 <= entropy_of(stream) * 1.02 + 32


def test_another_streams_frequency_table_takes_more_bits():
    written = symbols(15, 1000, 10)
    ours, others = tables(written, 15), tables(written[:, ::-1], 15)
    assert (decode(*encode(written, others), others, 1000) == written).all()
    assert len(encode(written, others)[2]) > 1.2 * len(encode(written, ours)[2])


# --- a cache as a stream of bytes ---

def of_tokens(n: int, channels: int = 12, seed: int = 0) -> Tensor:
    """Rows in which neighbouring tokens are similar and channels are not."""
    levels = rows(1, 1, channels, seed=seed)[0] * 4
    return levels + torch.cumsum(rows(1, n, channels, seed=seed + 1)[0] * 0.05, 0)


@pytest.mark.parametrize("group", [1, 4, 10])
@pytest.mark.parametrize("n", [1, 3, 4, 41])
def test_no_value_is_off_by_more_than_half_a_bin(group, n):
    written, bins = of_tokens(n), 16
    read = unpack(pack(written, bins, group))
    assert read.shape == written.shape and read.dtype == torch.float64
    rounded = (
        written
        if group == 1
        else written - torch.from_numpy(binned(written[::group].numpy(), 256).rows()).repeat_interleave(group, 0)[:n]
    )
    anchors = torch.arange(n) % group == 0
    most = rounded.abs().amax(1) / (2 * (bins // 2 - 1))
    if group > 1:
        most = torch.where(anchors, written.abs().amax(1) / (2 * 127), most)
    assert ((read - written).abs() <= most[:, None] * (1 + 1e-6) + 1e-12).all()


@pytest.mark.parametrize("bins", [12, 16, 32, 64, 2 ** 12])
def test_more_bins_reduce_the_error_and_zeros_stay_zeros(bins):
    written = of_tokens(30)
    written[4] = 0
    ours, finer = (unpack(pack(written, count, 1)) for count in (bins, 2 * bins))
    assert (ours - written).abs().mean() > 1.5 * (finer - written).abs().mean() > 0
    assert (ours[4] == 0).all()


def test_a_constant_text_takes_almost_no_words():
    once, again = (of_tokens(1).expand(count, -1) for count in (400, 800))
    read, anchors = unpack(pack(once, 16, 40)), torch.arange(400) % 40 == 0
    assert (read[~anchors] == read[1]).all() and (read[anchors] == read[0]).all()
    # a scale for each token, a byte for each number of an anchor, and at most two words a channel
    for group, others in ((1, 0), (40, 10 * 12)):
        assert len(pack(again, 16, group)) - len(pack(once, 16, group)) <= 400 * 4 + others + 12 * 4


def test_differences_to_an_anchor_are_smaller_and_therefore_more_exact():
    written = of_tokens(300)
    plain, apart = (unpack(pack(written, 16, group)) for group in (1, 10))
    assert (apart - written).abs().mean() < (plain - written).abs().mean() / 3


@pytest.mark.parametrize("layers, keys, values", [
    (32, [16] * 20 + [12] * 12, [16, 16] + [12] * 30), (8, [16] * 5 + [12] * 3, [16] + [12] * 7),
])
def test_early_layers_have_more_bins_and_boundaries_scale_with_the_depth(layers, keys, values):
    policy = make("cachegen", level="1")
    assert [policy.bins("keys", layer, layers) for layer in range(layers)] == keys
    assert [policy.bins("values", layer, layers) for layer in range(layers)] == values


def sent(knobs: dict, length: int = 6) -> tuple[int, float]:
    """Bytes of the stream, and how far the prompt's cache is from what was written, on average."""
    session = prepare(
        pair(),
        [LaneConfig("greedy", {}, [("cachegen", knobs)]), LaneConfig("greedy")],
        Prompt(TEXT * 2),
        Limits(max_new_tokens=length),
    )
    figures = [stamped.event for stamped in session if stamped.lane == 0 and isinstance(stamped.event, Figure)]
    stores = [runner.lane.target.store for runner in session._runners]
    n = len(session.headers[0].prompt_ids) - 1
    off = [
        float((ours.read(n) - plain.read(n)).abs().mean())
        for ours, plain in zip(*([*store.keys, *store.values] for store in stores))
    ]
    (bars,) = [figure for figure in figures if figure.shape == "bars"]
    assert check(session.trace) == []
    return bars.data["values"][-1], sum(off) / len(off)


def test_a_higher_level_sends_more_bytes_with_less_error():
    (small, far), (middle, nearer), (large, near) = (sent({"level": level}) for level in "123")
    assert small < middle < large and far > nearer > near > 0


def test_the_reported_size_is_that_of_the_stream_without_the_last_token(monkeypatch):
    streams = []

    def listening(*about):
        streams.append(pack(*about))
        return streams[-1]

    monkeypatch.setattr("strategies.kv_cache.cachegen.pack", listening)
    recorded, _ = sent({})
    assert recorded == sum(map(len, streams)) and len(streams) == 2 * 3
    (ours, plain) = (course(policy)[0] for policy in (make("cachegen"), make("mustafar", window=1024)))
    for part, exact in zip(ours.rows, plain.rows):
        assert torch.equal(part[:, -1], exact[:, -1]) and not torch.equal(part[:, :-1], exact[:, :-1])


def test_memory_is_not_reduced_and_the_first_token_is_that_of_the_full_cache():
    session = prepare(
        pair(),
        [LaneConfig("greedy", {}, [("cachegen", {"level": "1"})]), LaneConfig("greedy")],
        Prompt(TEXT),
        Limits(max_new_tokens=6),
    )
    caches = {lane: [] for lane in (0, 1)}
    for stamped in session:
        if isinstance(stamped.event, Cache):
            caches[stamped.lane].append(stamped.event)
    assert [cache.bytes for cache in caches[0]] == [cache.bytes for cache in caches[1]] and not any(
        cache.packed for cache in caches[0]
    )
    ours, plain = text(make("cachegen", level="1")), text(None)
    assert ours[len(PROMPT)] == plain[len(PROMPT)]


class KeysInPlaceOfValues(CacheGen):
    def _send(self, held, part):
        return super()._send(held, "keys")


class HeadsAreMixedUp(CacheGen):
    def _send(self, held, part):
        size = super()._send(held, part)
        held.write(part, held.read(part).flip(0))
        return size


class SentAgainAfterEveryKeep(CacheGen):
    def retain(self, held):
        if held.moment == "keep":
            self._send(held, "keys")
        return super().retain(held)


def by_hand(exact: Tensor, bins: int) -> Tensor:
    """The decoded stream, head by head and token by token."""
    half, found = bins // 2 - 1, exact.clone()
    for token in range(exact.shape[1] - 1):
        most = exact[:, token].abs().max().float().double()
        found[:, token] = (exact[:, token] * half / most).round().clamp(-half, half) / half * most
    return found


@pytest.mark.oracle("cachegen")
@pytest.mark.refuses("cachegen")
@pytest.mark.parametrize("wrong", variants_of(CacheGen, __name__), ids=lambda cls: cls.__name__)
def test_a_wrong_stream_is_detected(wrong):
    exact, length = course(make("mustafar", window=1024))[0].rows, len(PROMPT)
    expected = [by_hand(exact[0], 32), by_hand(exact[1], 32)]  # level 2, first layer
    right, ours = (course(cls())[-1].rows for cls in (CacheGen, wrong))
    assert all((part[:, :length] - hand).abs().max() < 1e-9 for part, hand in zip(right, expected))
    assert any((part[:, :length] - hand).abs().max() > 1e-3 for part, hand in zip(ours, expected))
