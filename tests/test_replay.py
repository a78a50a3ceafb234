"""Replayed forwards give the rows of eager ones after any operations on the cache, and nothing is recorded twice.

No GPU is needed: `Tape` records like a CUDA graph: operations at fixed addresses with fixed sizes without the
Python code around them, and replays them.
"""
from __future__ import annotations

from contextlib import nullcontext
from inspect import signature
from math import log2
from unittest.mock import Mock

import pytest
import torch
from architectures import tiny
from toys import byte_tokenizer

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.engine.attention.attention_mask import Window
from playground.engine.attention.recorded_attention import RecordedAttention
from playground.engine.cache.kv_cache import KVCache
from playground.engine.forward_input import ForwardInput
from playground.engine.graphs.graph_inputs import GraphInputs, TextRows
from playground.engine.graphs.graph_recorders import CudaGraphRecorder, run_eagerly
from playground.engine.graphs.graph_replay import GraphReplay, build_graph_replay
from playground.engine.graphs.graph_sizes import (
    BLOCK_SIZES,
    MIN_CAPACITY,
    PLACES,
    Bucket,
    block_size,
    buckets,
    capacities,
    capacity_for,
)
from playground.engine.hooks import LayerPlan
from playground.engine.model import Model
from playground.events import Commit, Done
from support.kv_caches import chain, scratch_row, words
from support.recorded_forwards import ENOUGH, Tape, recorded, tiny_writer
from support.replayed_forwards import EXACT, Both, distance, pair, small_rooms, wander  # noqa: F401

# --- sizes ---

def taken(rows: int, slots: int) -> Bucket:
    """The size of the forward of a block of `rows` in a cache of `slots`, including the block."""
    return Bucket(block_size(rows), capacity_for(slots))


@pytest.mark.parametrize("context", [1, 255, 256, 1000, 4096, 131072])
def test_every_size_uses_the_smallest_bucket_with_a_spare_slot(context):
    every = buckets(context)
    for rows in range(1, BLOCK_SIZES[-1] + 1):
        for slots in sorted({rows, context // 3 + rows, context}):
            if slots <= context:
                assert taken(rows, slots) == min(size for size in every if size.rows >= rows and size.slots > slots)


@pytest.mark.parametrize("context", [2048, 131072])
def test_there_are_few_buckets_and_at_most_a_third_of_a_large_buffer_is_unused(context):
    assert (
        len(set(buckets(context))) == len(buckets(context)) <= len(BLOCK_SIZES) * (2 * log2(context / MIN_CAPACITY) + 2)
    )
    assert all(taken(1, slots).slots <= 1.5 * (slots + 1) for slots in range(MIN_CAPACITY, context, 7))


@pytest.mark.parametrize("rows", range(1, 9))
def test_padding_attends_to_the_spare_slot_only_and_no_text_row_attends_to_it(rows):
    store, size = KVCache(depth=1), taken(rows, rows)
    buffers = GraphInputs(size, torch.device("cpu"))
    buffers.fill({0: TextRows([3] * rows, store.extend(chain(rows)))})
    spare = size.slots - 1
    assert torch.equal(buffers.seen[0, :rows, :rows], torch.ones(rows, rows, dtype=torch.bool).tril())
    assert buffers.seen[0, :rows].sum() == rows * (rows + 1) // 2
    padding = [spare] * (size.rows - rows)
    assert buffers.seen[0, rows:].nonzero()[:, 1].tolist() == buffers.slots[rows:].tolist() == padding


# --- a recorder that drops the Python code, as a CUDA graph does ---

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


LEFT_ALONE = {
    "an early exit": lambda model, store: model.forward([ForwardInput(store, [3], [-1])], LayerPlan(stop=1)),
    "attention is wanted": lambda model, store: model.forward(
        [ForwardInput(store, [3], [-1], watch=lambda position: True)]
    ),
    "a blend of tokens": lambda model, store: model.forward(
        [ForwardInput(store, [3], [-1], blends={0: ([3, 4], [0.5, 0.5])})]
    ),
    "more caches than places": lambda model, store: model.forward(
        [ForwardInput(each, [3], [-1]) for each in (store, *(model.new_store() for _ in range(PLACES[-1])))]
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
    caplog.set_level("WARNING", logger="playground.engine.implementations")

    def fails(run):
        raise RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(
        "playground.engine.implementations.build_graph_replay", lambda network: GraphReplay(network, fails, 0)
    )
    model = Model(tiny("llama"), byte_tokenizer(), "tiny")
    assert model.replay is None and model.fused is not None
    assert "tiny runs without the replay implementation: operation not permitted" in caplog.text


def test_a_fused_implementation_with_other_rows_is_not_used(monkeypatch, caplog):
    caplog.set_level("WARNING", logger="playground.engine.implementations")

    def nothing(positions, wanted, call, **inputs):
        return torch.zeros(len(wanted) if isinstance(wanted, torch.Tensor) else positions.shape[1], 96)

    monkeypatch.setattr("playground.engine.implementations.build_fused_llama", lambda network, context: nothing)
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


# --- strategies are unaffected ---

LANES = [
    LaneConfig("greedy"),
    LaneConfig("speculative", extras=[("prompt_lookup", {}), ("greedy_match", {})]),
    LaneConfig("speculative", extras=[("token_recycling", {}), ("greedy_match", {})]),
    LaneConfig("greedy", extras=[("top_p", {})]),
]


def write(model: Model, config: LaneConfig) -> list[int]:
    """The tokens a lane commits."""
    events = [
        stamped.event
        for stamped in prepare(
            Models(model), [config], Prompt("the red fox, the red fox, the"), Limits(max_new_tokens=24)
        )
    ]
    assert isinstance(events[-1], Done), events[-1]
    return [token for event in events if isinstance(event, Commit) for token in event.ids]


def test_lanes_write_what_they_write_without_recording():
    plain, model = tiny_writer(), tiny_writer()
    model.replay = GraphReplay(model.fused, Tape, ENOUGH)
    assert [write(model, config) for config in LANES] == [write(plain, config) for config in LANES]
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
    for config in LANES:
        write(model, config)
    assert model.replay.recorded() == before and len(made) == len(before)


# --- wrong variants, each detected by the random texts ---

def padding_writes_to_the_first_slot(buffers: GraphInputs, rows: int) -> None:
    buffers.slots[rows:] = 0


def padding_is_seen(buffers: GraphInputs, rows: int) -> None:
    buffers.seen[0, :rows, -1] = True


def all_of_the_scratch_is_seen(buffers: GraphInputs, rows: int) -> None:
    buffers.seen[0, :rows] |= buffers.seen[0, :rows].any(0)


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

    def wrong(buffers, texts):
        right(buffers, texts)
        for text in texts.values():
            spoil(buffers, text.segment.rows)
    monkeypatch.setattr(GraphInputs, "fill", wrong)
    assert found_out(pair) > 1e-6


@pytest.mark.parametrize("stale", ["ids", "positions", "slots", "seen"])
def test_a_stale_input_buffer_is_detected(pair, small_rooms, monkeypatch, stale):
    right = GraphInputs.fill

    def wrong(buffers, texts):
        last = getattr(buffers, stale).clone()
        right(buffers, texts)
        if last.any():
            getattr(buffers, stale).copy_(last)
    monkeypatch.setattr(GraphInputs, "fill", wrong)
    assert found_out(pair) > 1e-6


def test_host_reads_while_recording_are_detected(pair, small_rooms, monkeypatch):
    right, attend, known = GraphInputs.fill, RecordedAttention.__call__, {}

    def fill(buffers, texts):
        known["slots"] = max((t.segment.store.slots_of(0).count + t.segment.end for t in texts.values()), default=1)
        right(buffers, texts)

    def wrong(attention, *states):
        seen = attention._seen.clone()
        seen[..., known["slots"]:-1] = False
        seen[..., known["slots"] - 1] = True
        return attend(RecordedAttention(seen), *states)
    monkeypatch.setattr(GraphInputs, "fill", fill)
    monkeypatch.setattr(RecordedAttention, "__call__", wrong)
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
