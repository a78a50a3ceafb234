"""The interface of cache policies: attention of retained rows, different holes in every head, and quantised rows."""
from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from playground.contract import Merge
from playground.engine.attention_mask import EMPTY, Focus, Slots
from playground.engine.forward_input import ForwardInput
from playground.engine.kv_buffer import MergeMap
from playground.engine.kv_cache import KVCache
from playground.engine.model import ForwardInput, Model
from support.kv_caches import chain, exact_softmax, feed, twins, words
from support.laws import EXACT

HEARING = ("llama", "qwen3", "gemma2", "mistral", "gpt_neox", "gpt2", "cohere")
ROOM = 64  # positions of the longest text here


@pytest.fixture(scope="module", params=HEARING)
def pair(request) -> tuple[Model, PreTrainedModel]:
    return twins(request.param)


@pytest.fixture(scope="module")
def llama() -> tuple[Model, PreTrainedModel]:
    return twins("llama")


# --- observed attention ---

@dataclass
class Heard:
    """Attention reported by a cache, by layer [kv_heads, rows, positions]; reported twice counts twice."""

    layers: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, weights: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> None:
        held = self.layers.setdefault(layer, torch.zeros(len(weights), ROOM, ROOM, dtype=weights.dtype))
        for head, positions in enumerate(keys.expand(len(weights), -1).tolist()):
            for column, position in enumerate(positions):
                if position != EMPTY:
                    held[head, queries, position] += weights[head, :, column]

    def rows(self) -> set[int]:
        """Positions of the reported rows, the same in every layer."""
        recorded = {tuple(held.sum((0, 2)).nonzero().flatten().tolist()) for held in self.layers.values()}
        assert len(recorded) == 1
        return set(recorded.pop())


def listening(model: Model) -> tuple[KVCache, Heard]:
    store, heard = model.new_store(), Heard()
    store.on_attention = heard
    return store, heard


def feed_watched(
    model: Model, store: KVCache, tokens: list[int], parents: list[int], wanted=lambda position: True
) -> torch.Tensor:
    (rows,), _ = model.forward([ForwardInput(store, tokens, parents, watch=wanted)])
    return rows


@torch.inference_mode()
def library_attention(twin: PreTrainedModel, text: list[int], kv_heads: int) -> torch.Tensor:
    """Weights of the library's own attention, summed over the query heads of a group, [layers, kv_heads, n, n]."""
    twin.set_attn_implementation("eager")
    with exact_softmax():
        layers = twin(input_ids=torch.tensor([text]), use_cache=False, output_attentions=True).attentions
    return torch.stack([weights[0] for weights in layers]).unflatten(1, (kv_heads, -1)).sum(2)


def grow(chance: random.Random, text: list[int], store: KVCache, feed_more) -> Iterator[None]:
    """Grow random trees over several forwards each, and commit a random node of each."""
    guesses: list[int] = []
    while len(text) < ROOM - 20:
        for _ in range(chance.randrange(1, 4)):
            new = words(chance.random(), chance.randrange(1, 4))
            parents = [chance.randrange(-1, node) for node in range(len(guesses), len(guesses) + len(new))]
            feed_more(new, parents)
            guesses += new
        node = chance.randrange(-1, len(guesses))
        text += [guesses[i] for i in store.path(node)]
        guesses = [guesses[i] for i in store.commit(node)]
        if not guesses or chance.random() < 0.3:
            store.crop_scratch()
            guesses = []
        yield


def test_observed_attention_of_a_chain_equals_the_librarys(pair):
    model, twin = pair
    store, heard = listening(model)
    text = words(1, 20)
    for start, stop in ((0, 8), (8, 17), (17, 20)):
        feed_watched(model, store, text[start:stop], chain(stop - start))
        store.commit(stop - start - 1)
    expected = library_attention(twin, text, store.heads)
    assert heard.rows() == set(range(20))
    for layer, held in heard.layers.items():
        assert (held[:, :20, :20] - expected[layer]).abs().max() < EXACT
        assert held[:, :, 20:].abs().max() == 0


@pytest.mark.parametrize("seed", range(3))
def test_only_committed_rows_of_a_tree_are_observed_once_at_true_positions(pair, seed):
    model, twin = pair
    store, heard = listening(model)
    text = words(2, 6)
    feed_watched(model, store, text, chain(6))
    store.commit(5)
    for _ in grow(random.Random(seed), text, store, lambda new, parents: feed_watched(model, store, new, parents)):
        assert heard.rows() == set(range(len(text)))
    expected, n = library_attention(twin, text, store.heads), len(text)
    for layer, held in heard.layers.items():
        assert (held[:, :n, :n] - expected[layer]).abs().max() < EXACT


def test_only_the_rows_a_policy_requests_are_observed(llama):
    model, _ = llama
    store, heard = listening(model)
    for tokens, node in ((words(3, 10), 9), (words(4, 4), 2)):
        feed_watched(model, store, tokens, chain(len(tokens)), wanted=lambda position: 7 <= position < 12)
        store.commit(node)
    assert heard.rows() == {7, 8, 9, 10, 11}


def test_a_row_that_is_rolled_back_and_fed_again_is_observed_once(llama):
    model, twin = llama
    store, heard = listening(model)
    text = words(5, 9)
    feed_watched(model, store, text, chain(9))
    store.commit(8)
    store.roll_back(1)
    feed_watched(model, store, text[8:] + [3], [-1, 0])
    store.commit(1)
    expected = library_attention(twin, text + [3], store.heads)
    assert all((held[:, :10, :10] - expected[layer]).abs().max() < EXACT for layer, held in heard.layers.items())


def test_a_pruned_tree_is_observed_at_its_new_slots(llama):
    model, twin = llama
    store, heard = listening(model)
    text = words(6, 5)
    feed_watched(model, store, text, chain(5))
    store.commit(4)
    feed_watched(model, store, [10, 20, 30, 40], [-1, -1, 1, 2])
    store.prune([1, 2, 3])
    feed_watched(model, store, [50], [2])
    store.commit(3)
    expected = library_attention(twin, text + [20, 30, 40, 50], store.heads)
    assert all((held[:, :9, :9] - expected[layer]).abs().max() < EXACT for layer, held in heard.layers.items())


# --- holes in every head ---

def mask(store: KVCache, live: torch.Tensor) -> None:
    """Mask slots instead of evicting them; live [layers, kv_heads, positions]."""
    layers = [store.slots_of(layer) for layer in range(store.depth)]
    store.slots = [
        Slots(slots.positions.expand(store.heads, -1).masked_fill(~_stays(slots, live[i]), EMPTY), dense=False)
        for i, slots in enumerate(layers)
    ]


def evict(store: KVCache, live: torch.Tensor) -> None:
    store.evict([_stays(store.slots_of(layer), live[layer]) for layer in range(store.depth)])


def _stays(slots: Slots, live: torch.Tensor) -> torch.Tensor:
    positions = slots.positions.expand(len(live), -1)
    return live.gather(1, positions.clamp(min=0)) & (positions != EMPTY)


def test_an_evicted_slot_has_no_weight_although_its_token_was_attended_to(llama):
    model, _ = llama
    store, recorded = model.new_store(), []
    store.on_attention = lambda layer, weights, queries, keys: recorded.append(
        weights.masked_select((keys == EMPTY)[:, None])
    )
    feed_watched(model, store, words(7, 6), chain(6))
    store.commit(5)
    feed_watched(model, store, [5], [-1])  # it attends to evicted slots before its commit
    store.evict([torch.tensor([[1, 1, 1, 0, 1, 1], [1, 0, 0, 1, 1, 1]]).bool()])
    recorded.clear()
    store.commit(0)
    assert [weights.tolist() for weights in recorded] == [[0.0]] * 3


def test_selection_for_one_row_does_not_affect_others(llama):
    model, _ = llama
    plain, narrow = model.new_store(), model.new_store()
    narrow.focus = Focus(
        lambda layer, weights, queries: weights == weights.amax(-1, keepdim=True), lambda position: position == 7
    )
    for store in (plain, narrow):
        feed(model, store, words(7, 6), chain(6))
        store.commit(5)
    expected, found = (feed(model, store, [5, 6], [-1, 0]) for store in (plain, narrow))
    assert (found[0] - expected[0]).abs().max() < EXACT < (found[1] - expected[1]).abs().max()


@pytest.mark.parametrize("seed", range(3))
def test_evicting_and_masking_slots_give_equal_rows_and_attention_in_trees(pair, seed):
    model, _ = pair
    (freed, recorded), (hidden, expected) = listening(model), listening(model)
    lives = torch.rand(20, 3, 4, ROOM, generator=torch.Generator().manual_seed(seed)) < 0.8
    largest, text = 0.0, words(7, 12)

    def feed_both(new: list[int], parents: list[int]) -> None:
        nonlocal largest
        ours, theirs = (feed_watched(model, store, new, parents) for store in (freed, hidden))
        largest = max(largest, float((ours - theirs).abs().max()))

    feed_both(text, chain(12))
    both = Both(freed, hidden)
    both.commit(11)
    for live, _ in zip(lives, grow(random.Random(seed), text, both, feed_both)):
        evict(freed, live[:, :freed.heads])
        mask(hidden, live[:, :freed.heads])
    assert largest < EXACT
    assert freed.live_slots() == hidden.live_slots() < freed.depth * freed.heads * len(text) / 2
    assert all((recorded.layers[layer] - expected.layers[layer]).abs().max() < EXACT for layer in range(3))
    assert max(slots.count for slots in freed.slots) < len(text)


@dataclass
class Both:
    """Two KV caches that commit the same nodes."""

    one: KVCache
    other: KVCache

    def path(self, node: int) -> list[int]:
        return self.one.path(node)

    def commit(self, node: int) -> list[int]:
        self.other.commit(node)
        return self.one.commit(node)

    def crop_scratch(self) -> None:
        self.one.crop_scratch()
        self.other.crop_scratch()


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
    store.quantise(due, {"keys": tenths, "values": tenths})


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
