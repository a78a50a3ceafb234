"""The KV cache against recomputation from scratch, on many architectures, in float64."""
from __future__ import annotations

import random

import pytest
import torch
from architectures import ARCHITECTURES
from transformers import PreTrainedModel

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.attention.attention_mask import EMPTY, Slots, Window
from playground.engine.cache.kv_buffer import UNKNOWN, Capacity, KVBuffer
from playground.engine.cache.kv_cache import KVCache
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from support.kv_caches import chain, feed, scratch_row, twins, words
from support.laws import EXACT

TOKENS = 96


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request) -> tuple[Model, PreTrainedModel]:
    """A model with hooks, and an unmodified twin of its network."""
    return twins(request.param)


@pytest.fixture(scope="module")
def llama() -> tuple[Model, PreTrainedModel]:
    return twins("llama")


def test_every_node_of_a_tree_sees_its_path_and_nothing_else(pair):
    model, twin = pair
    store, prompt = model.new_store(), words(1, 9)
    feed(model, store, prompt, chain(9))
    store.commit(8)
    tokens, parents = [5, 7, 5, 9, 11, 3], [-1, -1, 0, 0, 1, 2]
    rows = feed(model, store, tokens, parents)
    for node in range(6):
        path = prompt + [tokens[i] for i in store.path(node)]
        assert (rows[node] - scratch_row(twin, path)).abs().max() < EXACT


def test_random_extends_commits_rollbacks_and_forks_leave_no_trace_of_rejected_nodes(pair):
    model, twin = pair
    chance, store = random.Random(7), model.new_store()
    text, guesses = [], []  # committed tokens; tokens of the scratch
    for _ in range(24):
        act = chance.choice(["extend", "extend", "fork", "commit", "roll back", "crop"])
        if act in ("extend", "fork") and len(text) + max([0, *store.depths]) < 60:
            leaf = chance.randrange(-1, len(guesses))
            new = words(chance.random(), 3)
            parents = chain(3, len(guesses)) if act == "extend" else [leaf, leaf, len(guesses)]
            parents[0] = leaf
            parents[1:] = [len(guesses), len(guesses) + 1] if act == "extend" else parents[1:]
            rows = feed(model, store, new, parents)
            guesses += new
            node = len(guesses) - 1
            path = text + [guesses[i] for i in store.path(node)]
            assert (rows[-1] - scratch_row(twin, path)).abs().max() < EXACT
        elif act == "commit" and guesses:
            node = chance.randrange(len(guesses))
            text += [guesses[i] for i in store.path(node)]
            guesses = [guesses[i] for i in store.commit(node)]
        elif act == "roll back" and text:
            count = chance.randrange(1, min(4, len(text)) + 1)
            store.roll_back(count)
            text, guesses = text[:len(text) - count], []
        elif act == "crop":
            store.crop_scratch()
            guesses = []
        assert store.length == len(text)
    rows = feed(model, store, [1], [-1])
    assert (rows[-1] - scratch_row(twin, text + [1])).abs().max() < EXACT


def test_two_leaves_of_one_cache_continue_in_one_forward(llama):
    model, twin = llama
    store, prompt = model.new_store(), words(2, 5)
    feed(model, store, prompt, chain(5))
    store.commit(4)
    feed(model, store, [10, 20], [-1, -1])
    rows = feed(model, store, [11, 21], [0, 1])
    assert (rows[0] - scratch_row(twin, prompt + [10, 11])).abs().max() < EXACT
    assert (rows[1] - scratch_row(twin, prompt + [20, 21])).abs().max() < EXACT


def test_caches_of_two_lanes_share_a_forward_without_mixing(llama):
    model, twin = llama
    one, two = model.new_store(), model.new_store()
    feed(model, one, words(3, 4), chain(4))
    one.commit(3)
    (first, second), _ = model.forward(
        [ForwardInput(one, [8, 9], [-1, 0]), ForwardInput(two, words(4, 6), chain(6), last_only=True)]
    )
    assert len(second) == 1
    assert (first[1] - scratch_row(twin, words(3, 4) + [8, 9])).abs().max() < EXACT
    assert (second[0] - scratch_row(twin, words(4, 6))).abs().max() < EXACT


def test_evicting_slots_equals_masking_them_in_every_layer_and_head(llama):
    model, _ = llama
    prompt = words(5, 12)
    torch.manual_seed(0)
    live = [torch.rand(2, 12) < 0.6 for _ in range(3)]
    evicted, masked = model.new_store(), model.new_store()
    for store in (evicted, masked):
        feed(model, store, prompt, chain(12))
        store.commit(11)
    evicted.evict(live)
    _mask_by_hand(masked, live)
    tokens, parents = [5, 6, 7], [-1, 0, 0]
    assert (feed(model, evicted, tokens, parents) - feed(model, masked, tokens, parents)).abs().max() < EXACT
    assert evicted.slots_of(0).count == int(live[0].sum(1).max())


def _mask_by_hand(store: KVCache, live: list[torch.Tensor]) -> None:
    """The same live slots, but as a mask, without moving keys."""
    positions = store.slots[0].positions
    store.slots = [Slots(positions.expand(2, -1).masked_fill(~mask, -1), dense=False) for mask in live]


def test_evicting_in_one_head_changes_the_rows(llama):
    """The oracle above would pass if eviction did nothing at all."""
    model, twin = llama
    store, prompt = model.new_store(), words(5, 12)
    feed(model, store, prompt, chain(12))
    store.commit(11)
    live = [torch.ones(2, 12, dtype=torch.bool) for _ in range(3)]
    live[1][0, 3:9] = False
    assert store.evict(live) == 6
    assert (feed(model, store, [5], [-1])[0] - scratch_row(twin, prompt + [5])).abs().max() > 1e-4


def test_positions_stay_true_after_eviction(llama):
    model, _ = llama
    store = model.new_store()
    feed(model, store, words(6, 10), chain(10))
    store.commit(9)
    store.evict([torch.arange(10)[None] % 2 == 0])
    assert store.runs() == [[[(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]]]
    assert store.extend([-1]).positions == [10]


def test_eviction_frees_memory(llama):
    model, _ = llama
    store = model.new_store()
    feed(model, store, words(7, 110), chain(110))
    store.commit(109)
    held, before = store.keys[0].rows.shape[1], store.bytes()
    store.evict([torch.arange(110)[None] >= 106])
    assert store.bytes() * 27 < before
    assert store.keys[0].rows.shape[1] < held


@pytest.mark.parametrize(
    "room, capacities",
    [
        (UNKNOWN, [256, 384, 384]),
        (Capacity(200, 1000), [320, 320, 512]),
        (Capacity(200, 400), [320, 320, 448]),
        (Capacity(200, 210), [256, 384, 384]),
        (Capacity(0, 1000), [256, 384, 384]),
    ],
)
def test_memory_is_allocated_for_the_known_length_and_no_more(room, capacities):
    pool, found = KVBuffer(room), []
    for at, count in ((0, 200), (200, 60), (260, 100)):
        pool.write(at, torch.zeros(2, count, 4))
        found.append(pool.rows.shape[1])
    assert found == capacities


@pytest.mark.parametrize("once, capacity", [(True, 64), (False, 384)])
def test_after_a_shared_prompt_only_private_tokens_take_memory(once, capacity):
    pool = KVBuffer(Capacity(300, 340))
    pool.start_from(torch.zeros(2, 300, 4), once)
    pool.write(300, torch.zeros(2, 20, 4))
    assert pool.rows.shape[1] == capacity


@pytest.mark.parametrize("new", [70, 4000])
def test_a_lane_passes_the_length_limit_to_its_cache(llama, new):
    session = prepare(Models(llama[0]), [LaneConfig("greedy")], Prompt("abc"), Limits(max_new_tokens=new))
    lane = session._runners[0].lane
    assert lane.target.store.capacity == (lane.prompt_length, min(lane.prompt_length + new, llama[0].context))


def test_a_window_hides_old_positions_from_decode_rows_but_not_from_the_prompt(llama):
    model, twin = llama
    store, prompt = model.new_store(), words(8, 10)
    store.window = Window(lambda query, key: (key < 2) | (query - key < 4), start=10)
    rows = feed(model, store, prompt, chain(10))
    assert (rows[-1] - scratch_row(twin, prompt)).abs().max() < EXACT
    store.commit(9)
    whole = feed(model, store, [3, 4], [-1, 0])
    store.crop_scratch()
    store.evict([(store.slots[0].positions < 2) | (10 - store.slots[0].positions < 4)])
    assert (feed(model, store, [3, 4], [-1, 0]) - whole).abs().max() < EXACT
    assert (whole[0] - scratch_row(twin, prompt + [3])).abs().max() > 1e-4


def test_chunked_prefill_equals_a_single_prefill(pair):
    model, _ = pair
    prompt, whole, pieces = words(9, 40), model.new_store(), model.new_store()
    expected = feed(model, whole, prompt, chain(40))
    for start in range(0, 40, 16):
        part = prompt[start:start + 16]
        rows = feed(model, pieces, part, chain(len(part)))
        pieces.commit(len(part) - 1)
        assert (rows - expected[start:start + len(part)]).abs().max() < EXACT


def test_a_node_cannot_continue_one_that_does_not_exist(llama):
    store = llama[0].new_store()
    with pytest.raises(ValueError, match="node 0 cannot continue node 3"):
        store.extend([3])
    with pytest.raises(ValueError, match="cannot roll back 1 of 0"):
        store.roll_back(1)


# --- reported contents ---

def walked(positions: list[int]) -> list[tuple[int, int]]:
    """Runs of one head's positions, a position at a time."""
    runs: list[tuple[int, int]] = []
    for position in sorted(p for p in positions if p != EMPTY):
        start = runs.pop()[0] if runs and runs[-1][1] == position else position
        runs.append((start, position + 1))
    return runs


def some_slots(chance: random.Random, length: int) -> Slots:
    """Slots of a few heads that hold different tokens, some of them empty."""
    heads = [sorted(chance.sample(range(length), chance.randint(0, length))) for _ in range(chance.randint(1, 3))]
    most = max(map(len, heads))
    for head in heads:
        while len(head) < most:
            head.insert(chance.randint(0, len(head)), EMPTY)
    positions = torch.tensor(heads, dtype=torch.long).view(len(heads), most)
    return Slots(positions, bool((positions != EMPTY).all()))


@pytest.mark.parametrize("seed", range(5))
def test_runs_of_all_heads_equal_those_of_each_head(seed):
    chance = random.Random(seed)
    for length in [*range(12)] * 5:
        store = KVCache(3, length=length)
        store.slots = [some_slots(chance, length) for _ in range(3)]
        expected = [[walked(head) for head in slots.positions.tolist()] for slots in store.slots]
        agree = [slots.dense and slots.count == length for slots in store.slots]
        assert store.runs() == [[[(0, length)]] if all_there else ranges for all_there, ranges in zip(agree, expected)]
        assert [slots.live for slots in store.slots] == [
            sum(p != EMPTY for head in slots.positions.tolist() for p in head) for slots in store.slots
        ]
