"""Replayed forwards give the rows of eager ones after any operations on the cache, and nothing is recorded twice.

No GPU is needed: `Tape` records like a CUDA graph: operations at fixed addresses with fixed sizes without the
Python code around them, and replays them.
"""
from __future__ import annotations

import random
from contextlib import nullcontext
from inspect import signature
from math import log2
from unittest.mock import Mock

import pytest
import torch
from architectures import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from toys import byte_tokenizer

import playground.engine.cuda_graphs as engine
from playground.contract.lane_config import LaneConfig
from playground.decoding.session import Limits, Models, Prompt, prepare
from playground.engine.attention_mask import Window
from playground.engine.cuda_graphs import (
    BLOCK_SIZES,
    MIN_CAPACITY,
    Bucket,
    CudaGraphRecorder,
    GraphBuffers,
    GraphInputs,
    GraphReplay,
    bucket,
    buckets,
    build_graph_replay,
    capacities,
    run_eagerly,
)
from playground.engine.forward_input import ForwardInput
from playground.engine.hooks import LayerPlan
from playground.engine.kv_buffer import KVBuffer
from playground.engine.kv_cache import KVCache
from playground.engine.model import Model
from playground.events import Commit, Done
from support.kv_caches import chain, scratch_row, words
from support.recorded_forwards import ENOUGH, Tape, recorded, tensors

EXACT = 1e-12
KINDS = ("llama", "qwen3")


# --- sizes ---

@pytest.mark.parametrize("context", [1, 255, 256, 1000, 4096, 131072])
def test_every_size_uses_the_smallest_bucket_with_a_spare_slot(context):
    every = buckets(context)
    for rows in range(1, BLOCK_SIZES[-1] + 1):
        for slots in sorted({rows, context // 3 + rows, context}):
            if slots <= context:
                assert bucket(rows, slots) == min(size for size in every if size.rows >= rows and size.slots > slots)


@pytest.mark.parametrize("context", [2048, 131072])
def test_there_are_few_buckets_and_at_most_a_third_of_a_large_buffer_is_unused(context):
    assert (
        len(set(buckets(context))) == len(buckets(context)) <= len(BLOCK_SIZES) * (2 * log2(context / MIN_CAPACITY) + 2)
    )
    assert all(bucket(1, slots).slots <= 1.5 * (slots + 1) for slots in range(MIN_CAPACITY, context, 7))


def test_a_block_too_long_for_any_bucket_has_none():
    assert bucket(BLOCK_SIZES[-1] + 1, 500) is None


@pytest.mark.parametrize("rows", range(1, 9))
def test_padding_attends_to_the_spare_slot_only_and_no_text_row_attends_to_it(rows):
    store, size = KVCache(depth=1), bucket(rows, rows)
    buffers = GraphInputs(size, torch.device("cpu"))
    buffers.fill([3] * rows, store.extend(chain(rows)))
    spare = size.slots - 1
    assert torch.equal(buffers.seen[:rows, :rows], torch.ones(rows, rows, dtype=torch.bool).tril())
    assert buffers.seen[:rows].sum() == rows * (rows + 1) // 2
    assert buffers.seen[rows:].nonzero()[:, 1].tolist() == buffers.slots[rows:].tolist() == [spare] * (size.rows - rows)


# --- a recorder that drops the Python code, as a CUDA graph does ---


@pytest.fixture(scope="module", params=KINDS)
def pair(request) -> tuple[Model, Model]:
    """A model that replays, and an equal one that does not."""
    return recorded(request.param), Model(tiny(request.param), byte_tokenizer(), request.param)


@pytest.fixture
def small_rooms(monkeypatch):
    """Buffers so small that a short text outgrows several."""
    monkeypatch.setattr(engine, "MIN_CAPACITY", 16)


class Both:
    """A text in two caches, one replayed and one eager; `worst` is the largest difference so far."""

    def __init__(self, pair: tuple[Model, Model]):
        self.models, self.stores = pair, [model.new_store() for model in pair]
        self.worst, self.tokens = 0.0, 0

    def feed(self, tokens: list[int], parents: list[int], **how) -> None:
        one, other = (
            model.forward([ForwardInput(store, tokens, parents, **how)])[0][0]
            for model, store in zip(self.models, self.stores)
        )
        self.worst = max(self.worst, distance(one, other))

    def read(self, count: int, seed: int = 1) -> Both:
        self.feed(words(seed, count), chain(count))
        return self.each("commit", count - 1)

    def each(self, act: str, *arguments) -> Both:
        for store in self.stores:
            getattr(store, act)(*arguments)
        return self


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference; infinite for nan."""
    return float((one - other).abs().nan_to_num(nan=float("inf")).max())


def wander(both: Both, seed: int, acts: int = 40, longest: int = 60) -> Both:
    """Random trees, chains and forks; some nodes are committed, some dropped, and some tokens rolled back."""
    chance, store = random.Random(seed), both.stores[0]
    for _ in range(acts):
        act = chance.choice(["chain", "tree", "fork", "commit", "prune", "roll back", "crop"])
        held = len(store.parents)
        if act in ("chain", "tree", "fork") and store.length + max([0, *store.depths]) < longest:
            count, leaf = chance.randrange(1, 9), chance.randrange(-1, held)
            parents = {"chain": [leaf, *range(held, held + count - 1)], "fork": [leaf] * count,
                       "tree": [leaf, *(chance.randrange(held, held + i) for i in range(1, count))]}[act]
            both.feed(words(chance.random(), count), parents, last_only=chance.random() < 0.3)
        elif act == "commit" and held:
            both.each("commit", chance.randrange(held))
        elif act == "prune" and held:
            both.each("prune", store.path(chance.randrange(held)))
        elif act == "roll back" and store.length:
            both.each("roll_back", chance.randrange(1, min(6, store.length) + 1))
        elif act == "crop":
            both.each("crop_scratch")
    return both


def test_replayed_rows_equal_ordinary_ones_through_trees_forks_commits_and_rollbacks(pair, small_rooms):
    assert max(wander(Both(pair), seed).worst for seed in range(6)) < EXACT
    sizes = pair[0].replay.recorded()
    assert len({size.slots for size in sizes}) >= 3 and {size.rows for size in sizes} >= {1, 2, 4, 8}, (
        "too little was tried"
    )


def test_two_texts_in_turn_do_not_see_each_other(pair, small_rooms):
    one, other = Both(pair).read(9, seed=1), Both(pair).read(5, seed=2)
    for step in range(12):
        one.feed([step], [-1])
        other.feed([90 - step, 7], [-1, -1])
        one.each("commit", 0)
        other.each("commit", step % 2)
    assert max(one.worst, other.worst) < EXACT


def test_a_replayed_row_equals_the_librarys():
    model, twin, prompt = recorded("llama"), tiny("llama"), words(3, 9)
    store = model.new_store()
    model.forward([ForwardInput(store, prompt, chain(9))])
    store.commit(8)
    (rows,), _ = model.forward([ForwardInput(store, [5, 7, 11], [-1, 0, 0])])
    assert distance(rows[2], scratch_row(twin, [*prompt, 5, 11])) < 1e-9


def test_returned_rows_do_not_change_with_the_next_forward():
    model = recorded("llama")
    store = model.new_store()
    (first,), _ = model.forward([ForwardInput(store, [5, 9], [-1, -1])])
    held = first.clone()
    model.forward([ForwardInput(store, [7, 3], [-1, -1])])
    assert torch.equal(first, held)


def test_a_prefill_runs_eagerly_and_decode_steps_are_replayed(pair):
    both = Both(pair)
    both.models[0].replay.buffers.clear()
    both.read(BLOCK_SIZES[-1] + 6)
    assert not both.models[0].replay.buffers
    both.feed([3], [-1])
    assert both.models[0].replay.recorded() == {Bucket(1, MIN_CAPACITY)} and both.worst < EXACT


# --- what runs eagerly ---

def refuse(run):
    raise AssertionError("this forward must not be recorded")


def the_first_half(positions: torch.Tensor) -> torch.Tensor:
    return positions < positions.shape[-1] // 2


LEFT_ALONE = {
    "an early exit": lambda model, store: model.forward([ForwardInput(store, [3], [-1])], LayerPlan(stop=1)),
    "hidden states are wanted": lambda model, store: model.forward(
        [ForwardInput(store, [3], [-1])], LayerPlan(capture=frozenset([1]))
    ),
    "attention is wanted": lambda model, store: model.forward(
        [ForwardInput(store, [3], [-1], watch=lambda position: True)]
    ),
    "a blend of tokens": lambda model, store: model.forward(
        [ForwardInput(store, [3], [-1], blends={0: ([3, 4], [0.5, 0.5])})]
    ),
    "two stores": lambda model, store: model.forward(
        [ForwardInput(store, [3], [-1]), ForwardInput(model.new_store(), [3], [-1])]
    ),
}


@pytest.mark.parametrize("ask", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_everything_but_a_plain_forward_runs_eagerly(ask):
    plain, model = Model(tiny("llama"), byte_tokenizer(), "llama"), recorded("llama", refuse)
    assert all(
        distance(*rows) < EXACT for rows in zip(ask(plain, plain.new_store())[0], ask(model, model.new_store())[0])
    )


def test_a_cache_with_holes_or_a_window_runs_eagerly(pair):
    for narrow in (lambda store: store.evict([torch.tensor([[True] * 8, [False] * 4 + [True] * 4])]),
                   lambda store: setattr(store, "window", Window(lambda query, key: key > 3, 0))):
        both = Both(pair).read(8)
        for store in both.stores:
            narrow(store)
        pair[0].replay._record, keeping = refuse, pair[0].replay._record
        both.models[0].replay.buffers.clear()
        both.feed([3, 4], [-1, -1])
        pair[0].replay._record = keeping
        assert both.worst < EXACT


def test_a_cache_from_which_every_head_dropped_the_same_number_is_replayed(pair):
    both = Both(pair).read(12)
    both.each("evict", [torch.tensor([[True] * 2 + [False] * 3 + [True] * 7])])
    both.models[0].replay.buffers.clear()
    both.feed([3, 4, 5], [-1, 0, 0])
    assert both.models[0].replay.buffers and both.worst < EXACT


def test_a_text_longer_than_a_sliding_window_runs_eagerly():
    pair = recorded("mistral"), Model(tiny("mistral"), byte_tokenizer(), "mistral")  # its window has six tokens
    both = Both(pair).read(5)
    both.feed([3], [-1])
    before = len(pair[0].replay.buffers)
    both.each("commit", 0).each("commit", -1)
    pair[0].replay.buffers.clear()
    both.feed([4, 5, 6], [-1, 0, 1])
    assert before and not pair[0].replay.buffers and both.worst < EXACT


def test_without_a_gpu_or_a_fused_network_nothing_is_recorded():
    assert Model(tiny("llama"), byte_tokenizer(), "llama").replay is None
    assert build_graph_replay(None) is None


def test_a_device_without_graph_support_runs_eagerly_with_a_log_entry(monkeypatch, caplog):
    caplog.set_level("WARNING", logger="playground.engine.model")

    def fails(run):
        raise RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr("playground.engine.model.build_graph_replay", lambda network: GraphReplay(network, fails, 0))
    model = Model(tiny("llama"), byte_tokenizer(), "tiny")
    assert model.replay is None and model.fused is not None
    assert "tiny runs without the replay implementation: operation not permitted" in caplog.text


def test_a_fused_implementation_with_other_rows_is_not_used(monkeypatch, caplog):
    caplog.set_level("WARNING", logger="playground.engine.model")

    def nothing(positions, wanted, call, **inputs):
        return torch.zeros(len(wanted) if isinstance(wanted, torch.Tensor) else positions.shape[1], 96)

    monkeypatch.setattr("playground.engine.model.build_fused_llama", lambda network, context: nothing)
    assert Model(tiny("llama"), byte_tokenizer(), "tiny").fused is None
    assert "runs without the fused implementation, whose error is" in caplog.text


@pytest.fixture
def cuda_calls(monkeypatch) -> list[str]:
    """The order of calls to a test double for a GPU that has torch's functions, those that wait for it included."""
    calls, known = [], signature(torch.cuda.CUDAGraph.capture_begin)

    class Graph:
        def capture_begin(self, *args, **kwargs):
            known.bind(self, *args, **kwargs)
            calls.append("begin")

        def capture_end(self):
            calls.append("end")
            if "failed" in calls:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay(self):
            calls.append("replay")

    cuda = {
        "CUDAGraph": Graph,
        "Stream": Mock(),
        "current_stream": Mock(),
        "stream": Mock(side_effect=nullcontext),
        "device": Mock(side_effect=nullcontext),
        "graph_pool_handle": Mock(),
        "synchronize": lambda *args: calls.append("synchronize"),
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return calls


def test_a_graph_is_recorded_after_an_eager_run_and_replayed_at_once(cuda_calls):
    again = CudaGraphRecorder(torch.device("cuda:0"))(lambda: cuda_calls.append("run"))
    assert cuda_calls == ["run", "begin", "run", "end", "replay"], "and nothing waits for the whole device"
    again()
    assert cuda_calls[5:] == ["replay"]


def test_a_failed_recording_ends_and_reports_its_own_error(cuda_calls):
    def run():
        if "begin" in cuda_calls:
            cuda_calls.append("failed")
            raise torch.OutOfMemoryError("no memory for a graph")

    with pytest.raises(torch.OutOfMemoryError, match="no memory for a graph"):
        CudaGraphRecorder(torch.device("cuda:0"))(run)
    assert cuda_calls == ["begin", "failed", "end"]


# --- memory ---

def test_after_the_first_forward_of_a_size_only_returned_rows_allocate_memory():
    watch, taken = Watch(), []
    model = recorded("llama", watch.uncounted)
    store = model.new_store()
    for _ in range(6):
        with torch.inference_mode(), watch:
            model.replay([3, 4, 5], store.extend([-1, 0, 0]))
        store.crop_scratch()
        taken.append(watch.taken())
    assert taken[0] > 1 and taken[1:] == [1] * 5


class Watch(TorchDispatchMode):
    """Counts operations that allocate new memory. Recordings do not count: a graph has its memory
    already.
    """

    def __init__(self):
        super().__init__()
        self._new, self._counting = 0, True

    def uncounted(self, run):
        def quietly():
            self._counting = False
            run()
            self._counting = True
        quietly()
        return quietly

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        self._new += self._counting * sum(tensor.untyped_storage().data_ptr() not in known for tensor in tensors(out))
        return out

    def taken(self) -> int:
        """Since it was last asked."""
        new, self._new = self._new, 0
        return new


def test_a_cache_keeps_its_buffer_until_it_outgrows_it(small_rooms):
    model = recorded("llama", run_eagerly)
    store, places = model.new_store(), []
    for _ in range(40):
        model.forward([ForwardInput(store, [3, 4], [-1, 0])])
        store.commit(0)
        places.append(store.keys[0].rows.data_ptr())
    assert store.keys[0].rows.shape[1] == 48
    assert len(set(places)) == len([size for size in (16, 24, 32, 48)])


def test_a_buffer_is_reused_after_its_text_without_leaking_contents():
    model = recorded("llama", run_eagerly)
    first, second = model.new_store(), model.new_store()
    model.forward([ForwardInput(first, [3, 4], [-1, 0])])
    room, held = model.replay.buffers[0], first.keys[0].rows[:, :2].clone()
    room.keys[0][:, 100] = float("nan")
    first.done = True
    (rows,), _ = model.forward([ForwardInput(second, [5, 6], [-1, 0])])
    assert model.replay.buffers == [room] and room.holds(second) and rows.isfinite().all()
    assert torch.equal(first.keys[0].rows[:, :2], held), "who was there before lost what it holds"


def test_a_buffer_in_use_is_not_reused():
    model = recorded("llama", run_eagerly)
    stores = [model.new_store() for _ in range(3)]
    for store in stores:
        model.forward([ForwardInput(store, [3], [-1])])
    assert len(model.replay.buffers) == len({store.keys[0].rows.data_ptr() for store in stores}) == 3


def test_unused_buffers_are_kept_up_to_their_share_of_memory(small_rooms):
    model = recorded("llama", run_eagerly)
    model.replay._free_bytes = GraphBuffers(24, model.fused).bytes
    store = model.new_store()
    for _ in range(40):
        model.forward([ForwardInput(store, [3], [-1])])
        store.commit(0)
    *free, own = model.replay.buffers
    assert own.holds(store) and sum(room.bytes for room in free) <= model.replay._free_bytes


# --- no memory left ---

def no_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_text_whose_recording_finds_no_memory_goes_on_eagerly(small_rooms, caplog):
    tries, pair = [], (recorded("llama", lambda run: no_memory(tries.append(run))), plain_llama())
    both = wander(Both(pair), seed=0)
    assert both.worst < EXACT and len(tries) == 1, "one attempt for each text"
    assert "no memory for a replayed forward" in caplog.text
    another = Both(pair)
    another.feed([3], [-1])
    assert len(tries) == 2 and another.worst < EXACT


def test_a_text_whose_next_buffer_finds_no_memory_goes_on_eagerly_and_unused_ones_are_freed(small_rooms, monkeypatch):
    pair = recorded("llama", run_eagerly), plain_llama()
    finished, both = Both(pair).read(30), Both(pair).read(1)
    finished.stores[0].done = True
    monkeypatch.setattr(engine, "GraphBuffers", no_memory)
    for token in range(20):
        both.feed([token], [-1])
        both.each("commit", 0)
    assert both.worst < EXACT and both.stores[0].eager
    assert not any(memory.holds(finished.stores[0]) for memory in pair[0].replay.buffers)


def test_a_cache_that_was_moved_in_part_keeps_its_contents(small_rooms, monkeypatch):
    pair, moved, move = (recorded("llama", run_eagerly), plain_llama()), [], KVBuffer.move
    Both(pair).read(3).stores[0].done = True  # its buffer is taken by the next text
    other = Both(pair)
    own = [*other.stores[0].keys, *other.stores[0].values]

    def fails_at_the_third(buffer, into, used):
        moved.extend([buffer] if buffer in own else [])
        return no_memory() if len(moved) == 3 else move(buffer, into, used)

    monkeypatch.setattr(KVBuffer, "move", fails_at_the_third)
    other.feed([5, 6], [-1, 0])
    other.each("commit", 1)
    Both(pair).read(4, seed=2)  # a third text, which needs a buffer too
    other.feed([7], [-1])
    assert len(moved) == 3 and other.worst < EXACT


@pytest.mark.parametrize("error", [RuntimeError, ValueError, AttributeError])
def test_an_error_while_graphs_are_set_up_does_not_stop_loading(monkeypatch, caplog, error):
    def fails(network):
        raise error("the driver is too old")
    monkeypatch.setattr("playground.engine.model.build_graph_replay", fails)
    model = plain_llama()
    assert model.replay is None and model.fused is not None
    assert "runs without the replay implementation: the driver is too old" in caplog.text


def plain_llama() -> Model:
    return Model(tiny("llama"), byte_tokenizer(), "llama")


# --- strategies are unaffected ---

LANES = [
    LaneConfig("greedy"),
    LaneConfig("speculative", extras=[("prompt_lookup", {}), ("greedy_match", {})]),
    LaneConfig("speculative", extras=[("token_recycling", {}), ("greedy_match", {})]),
    LaneConfig("greedy", extras=[("top_p", {})]),
]


def write(model: Model, recipe: LaneConfig) -> list[int]:
    """The tokens a lane commits."""
    events = [
        stamped.event
        for stamped in prepare(
            Models(model), [recipe], Prompt("the red fox, the red fox, the"), Limits(max_new_tokens=24)
        )
    ]
    assert isinstance(events[-1], Done), events[-1]
    return [token for event in events if isinstance(event, Commit) for token in event.ids]


def tiny_writer() -> Model:
    """With the tokenizer's own vocabulary, so that it can write."""
    from toys import network
    return Model(network("llama").double(), byte_tokenizer(), "tiny")


def test_lanes_write_what_they_write_without_recording():
    plain, model = tiny_writer(), tiny_writer()
    model.replay = GraphReplay(model.fused, Tape, ENOUGH)
    assert [write(model, recipe) for recipe in LANES] == [write(plain, recipe) for recipe in LANES]
    assert model.replay.recorded()


def test_a_lane_that_changes_its_strategy_records_nothing_again():
    made = []

    def counted(run):
        made.append(run)
        return run_eagerly(run)

    model = tiny_writer()
    model.replay = GraphReplay(model.fused, counted, ENOUGH)
    for rows in BLOCK_SIZES:
        model.forward([ForwardInput(store := model.new_store(), [3] * rows, [-1] * rows)])
        store.done = True
    before = model.replay.recorded()
    assert len(made) == len(before) == len(BLOCK_SIZES)
    for recipe in LANES:
        write(model, recipe)
    assert model.replay.recorded() == before and len(made) == len(before)


# --- wrong variants, each detected by the random texts ---

def padding_writes_to_the_first_slot(buffers: GraphInputs, rows: int) -> None:
    buffers.slots[rows:] = 0


def padding_is_seen(buffers: GraphInputs, rows: int) -> None:
    buffers.seen[:rows, -1] = True


def all_of_the_scratch_is_seen(buffers: GraphInputs, rows: int) -> None:
    buffers.seen[:rows] |= buffers.seen[:rows].any(0)


def positions_follow_the_slots(buffers: GraphInputs, rows: int) -> None:
    buffers.positions[:rows] = buffers.slots[:rows]


WRONG = [padding_writes_to_the_first_slot, padding_is_seen, all_of_the_scratch_is_seen, positions_follow_the_slots]


def found_out(pair: tuple[Model, Model]) -> float:
    """The largest difference of rows of random texts from the eager ones."""
    model, plain = pair
    model.replay = GraphReplay(model.fused, Tape, ENOUGH)
    return max(wander(Both((model, plain)), seed).worst for seed in range(2))


@pytest.mark.parametrize("spoil", WRONG)
def test_wrong_buffers_are_detected(pair, small_rooms, monkeypatch, spoil):
    right = GraphInputs.fill

    def wrong(buffers, tokens, segment):
        right(buffers, tokens, segment)
        spoil(buffers, segment.rows)
    monkeypatch.setattr(GraphInputs, "fill", wrong)
    assert found_out(pair) > 1e-6


@pytest.mark.parametrize("stale", ["ids", "positions", "slots", "seen"])
def test_a_stale_input_buffer_is_detected(pair, small_rooms, monkeypatch, stale):
    right = GraphInputs.fill

    def wrong(buffers, tokens, segment):
        last = getattr(buffers, stale).clone()
        right(buffers, tokens, segment)
        if last.any():
            getattr(buffers, stale).copy_(last)
    monkeypatch.setattr(GraphInputs, "fill", wrong)
    assert found_out(pair) > 1e-6


def test_host_reads_while_recording_are_detected(pair, small_rooms, monkeypatch):
    right, known = GraphInputs.fill, {}

    def fill(buffers, tokens, segment):
        known["slots"] = segment.store.slots_of(0).count + segment.end
        right(buffers, tokens, segment)

    def bias(seat, layer, sliding_window, groups, dtype):
        seen = seat._inputs.seen.clone()
        seen[:, known["slots"]:-1] = False
        seen[:, known["slots"] - 1] |= True
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf")).repeat(groups, 1)
    monkeypatch.setattr(GraphInputs, "fill", fill)
    monkeypatch.setattr(engine.GraphSegment, "bias", bias)
    assert found_out(pair) > 1e-6


def test_buffer_sizes_grow_by_half_and_by_a_third_alternately():
    sizes = capacities()
    assert [next(sizes) for _ in range(5)] == [
        MIN_CAPACITY,
        MIN_CAPACITY * 3 // 2,
        MIN_CAPACITY * 2,
        MIN_CAPACITY * 3,
        MIN_CAPACITY * 4,
    ]
