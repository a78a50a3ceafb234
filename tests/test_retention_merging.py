"""Merged slots and quantised rows of a KV cache."""
from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.functional import pad

from playground.contract import Merge
from playground.engine.cache.kv_buffer import MergeMap
from playground.engine.cache.kv_cache import KVCache
from support.kv_caches import chain, feed, words
from support.laws import EXACT
from support.retained_slots import Both, evict, grow, llama, mask, pair  # noqa: F401

# --- merged slots ---

def some_merge(store: KVCache, seed: int) -> Merge:
    """Random slots of a layer that merge into others, with random weights."""
    chance, n = torch.Generator().manual_seed(seed), store.slots[0].count
    goes = torch.rand(store.heads, n, generator=chance) < 0.4
    heads, sources = goes.nonzero().unbind(1)
    meeting = MergeMap.of(
        (heads, sources), (~goes).double().multinomial(n, replacement=True, generator=chance)[heads, sources], n
    )
    return Merge(
        meeting, *(torch.rand(count, generator=chance).double() for count in (len(heads), len(meeting.targets[0])))
    )


def mixed(rows: torch.Tensor, merge: Merge) -> torch.Tensor:
    """Rows as one matrix product per head; rows without sources are unchanged."""
    (sources, into, (heads, slots)), added, kept = merge
    matrix, takes = (
        torch.zeros(len(rows), rows.shape[1], rows.shape[1], dtype=rows.dtype),
        torch.zeros(rows.shape[:2], dtype=torch.bool),
    )
    matrix[heads, slots, slots] = kept
    matrix[sources[0], slots[into], sources[1]] = added
    takes[heads, slots] = True
    return torch.where(takes[..., None], matrix @ rows, rows)


@pytest.mark.parametrize("seed", range(3))
def test_merged_slots_act_like_slots_written_that_way_in_trees(pair, seed):
    model, _ = pair
    merged, plain = model.new_store(), model.new_store()
    for store in (merged, plain):
        feed(model, store, words(13, 14), chain(14))
        store.commit(13)
        feed(model, store, [9, 10, 11], [-1, 0, 0])
    recorded = []
    for layer in range(3):
        merge = some_merge(merged, 10 * seed + layer)
        for pool in (plain.keys[layer], plain.values[layer]):
            pool.rows[:, :14] = mixed(pool.rows[:, :14], merge)
        recorded.append(merged.merge(layer, *merge).by_head(merged.heads))
        expected = merge.merge_map.sources[0].bincount(minlength=merged.heads).tolist()
        assert [len(head) for head in recorded[-1]] == expected
    stays = torch.rand(3, merged.heads, 14, generator=torch.Generator().manual_seed(seed)) < 0.7
    evict(merged, stays)
    mask(plain, stays)
    tree = [5, 6, 7], [0, 2, 3]
    assert (feed(model, merged, *tree) - feed(model, plain, *tree)).abs().max() < EXACT
    assert all(source != target for layer in recorded for head in layer for source, target in head)


def test_merges_are_reported_by_position_after_compaction(llama):
    model, _ = llama
    store = model.new_store()
    feed(model, store, words(14, 6), chain(6))
    store.commit(5)
    store.evict([torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 0, 1, 1, 0]]).bool()])
    meeting = MergeMap.of((torch.tensor([0, 0, 1]), torch.tensor([2, 3, 0])), torch.tensor([1, 1, 3]), 4)
    assert store.merge(1, meeting, torch.ones(3), torch.ones(2)).by_head(2) == [[(4, 2), (5, 2)], [(0, 4)]]


# --- quantised rows ---

@dataclass
class Tenths:
    """Rows rounded to one decimal: so coarse that the difference always shows."""

    rows: torch.Tensor

    @property
    def count(self) -> int:
        return self.rows.shape[1]

    @property
    def bytes(self) -> int:
        return self.rows.numel()

    def unpack(self, room: int = 0) -> torch.Tensor:
        return pad(self.rows, (0, 0, 0, room))


def tenths(rows: torch.Tensor, packed: Tenths | None) -> Tenths:
    coarse = (rows * 10).round() / 10
    return Tenths(torch.cat([packed.rows, coarse], 1) if packed else coarse)


def due(part: str, exact: int) -> int:
    """Keys in fours, values all but the last three."""
    return exact - exact % 4 if part == "keys" else max(0, exact - 3)


def pack(store: KVCache) -> None:
    store.quantise(range(store.depth), due, lambda layer, part: tenths)


@dataclass
class Rounded:
    """Applies the rounding of the quantisation to the rows of a cache in place."""

    store: KVCache
    done: dict[str, int] = field(default_factory=lambda: {"keys": 0, "values": 0})

    def pack(self) -> None:
        for part, pools in (("keys", self.store.keys), ("values", self.store.values)):
            first = self.done[part]
            self.done[part] += due(part, self.store.length - first)
            for pool in pools:
                pool.rows[:, first:self.done[part]] = tenths(pool.rows[:, first:self.done[part]], None).rows


@pytest.mark.parametrize("seed", range(3))
def test_quantised_rows_act_like_rows_written_with_that_error(pair, seed):
    model, _ = pair
    packed, plain = model.new_store(), model.new_store()
    rounded, both, largest, text = Rounded(plain), Both(packed, plain), 0.0, words(8, 13)

    def feed_both(new: list[int], parents: list[int]) -> None:
        nonlocal largest
        largest = max(
            largest, float((feed(model, packed, new, parents) - feed(model, plain, new, parents)).abs().max())
        )

    feed_both(text, chain(13))
    both.commit(12)
    for _ in grow(random.Random(seed), text, both, feed_both):
        pack(packed)
        rounded.pack()
        assert (
            packed.quantised_slots() == len(text) - len(text) % 4 and packed.values[0].quantised_slots == len(text) - 3
        )
    assert largest < EXACT


def test_quantisation_changes_rows(llama):
    """The oracle above would pass if quantisation did nothing at all."""
    model, _ = llama
    packed, plain = model.new_store(), model.new_store()
    for store in (packed, plain):
        feed(model, store, words(9, 12), chain(12))
        store.commit(11)
    pack(packed)
    assert (feed(model, packed, [5], [-1]) - feed(model, plain, [5], [-1])).abs().max() > 1e-3


@pytest.mark.parametrize(
    "live", ["the first four go", "one of the first four goes", "late ones go", "other ones in every head"]
)
def test_slots_may_be_evicted_among_quantised_rows(llama, live):
    model, _ = llama
    packed, plain = model.new_store(), model.new_store()
    for store in (packed, plain):
        feed(model, store, words(10, 14), chain(14))
        store.commit(13)
    pack(packed)
    Rounded(plain).pack()
    places = torch.arange(14).expand(3, 2, 14)
    stays = {
        "the first four go": places >= 4,
        "one of the first four goes": places != 2,
        "late ones go": (places < 12) | (places == 13),
        "other ones in every head": torch.rand(3, 2, 14, generator=torch.Generator().manual_seed(0)) < 0.6,
    }[live]
    evict(packed, stays)
    evict(plain, stays)
    tree = [5, 6, 7], [-1, 0, 0]
    assert (feed(model, packed, *tree) - feed(model, plain, *tree)).abs().max() < EXACT
    assert packed.live_slots() == int(stays.sum())


def test_quantised_rows_are_dequantised_only_if_one_is_evicted(llama):
    model, _ = llama
    store = model.new_store()
    feed(model, store, words(11, 14), chain(14))
    store.commit(13)
    pack(store)
    store.evict([torch.arange(14)[None] != 13])
    assert (store.keys[0].quantised_slots, store.values[0].quantised_slots) == (12, 11)
    store.evict([torch.arange(13)[None] != 10])
    assert (store.keys[0].quantised_slots, store.values[0].quantised_slots) == (0, 0)


def test_the_last_token_can_be_rolled_back_with_a_quantised_key(llama):
    model, _ = llama
    store, plain = model.new_store(), model.new_store()
    text = words(12, 12)
    for each in (store, plain):
        feed(model, each, text, chain(12))
        each.commit(11)
    pack(store)
    Rounded(plain).pack()
    for each in (store, plain):
        each.roll_back(1)
    assert (feed(model, store, [7], [-1]) - feed(model, plain, [7], [-1])).abs().max() < EXACT
