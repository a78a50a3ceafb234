"""Mustafar: pruned keys and values."""
from __future__ import annotations

import itertools

import pytest
import torch
from pairs import pair
from torch import Tensor

from playground.algorithms.kv_cache.quantization import unpack_bits
from playground.contract import make
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.events import Cache
from playground.trace import check
from strategies.kv_cache.mustafar import Mustafar, Sparse, sparse
from support.budget_policies import TREE
from support.coded_caches import TEXT, course, norm, text
from support.packed_caches import PROMPT, rows
from support.wrong_variants import variants_of


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
@pytest.mark.parametrize("config", [LaneConfig("greedy"), TREE], ids=["greedy", "tree"])
def test_traces_of_lanes_with_these_caches_are_consistent(name, knobs, config):
    lane = LaneConfig(config.strategy, config.knobs, [*config.extras, (name, knobs)])
    session = prepare(pair(), [lane], Prompt(TEXT), Limits(max_new_tokens=10))
    caches = [stamped.event for stamped in session if isinstance(stamped.event, Cache)]
    assert check(session.trace) == [] and all(cache.packed > 0 and cache.evicted == 0 for cache in caches)
