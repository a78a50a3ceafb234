"""Memory of recorded forwards, and what happens when none is left."""
from __future__ import annotations

import pytest
import torch
from architectures import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from toys import byte_tokenizer

import playground.engine.graphs.graph_replay as engine
from playground.engine.cache.kv_buffer import KVBuffer
from playground.engine.forward_input import ForwardInput
from playground.engine.graphs.graph_memory import GraphBuffers
from playground.engine.graphs.graph_recorders import run_eagerly
from playground.engine.model import Model
from support.recorded_forwards import recorded, tensors
from support.replayed_forwards import EXACT, Both, pair, small_rooms, wander  # noqa: F401

# --- memory ---

def test_after_the_first_forward_of_a_size_only_returned_rows_allocate_memory():
    watch, taken = Watch(), []
    model = recorded("llama", watch.uncounted)
    store = model.new_store()
    for _ in range(6):
        with torch.inference_mode(), watch:
            model.replay([work := ForwardInput(store, [3, 4, 5], [-1, 0, 0])], [work.segment()])
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
    caplog.set_level("WARNING", logger="playground.engine.graphs.graph_replay")
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
    caplog.set_level("WARNING", logger="playground.engine.implementations")

    def fails(network):
        raise error("the driver is too old")
    monkeypatch.setattr("playground.engine.implementations.build_graph_replay", fails)
    model = plain_llama()
    assert model.replay is None and model.fused is not None
    assert "runs without the replay implementation: the driver is too old" in caplog.text


def plain_llama() -> Model:
    return Model(tiny("llama"), byte_tokenizer(), "llama")
