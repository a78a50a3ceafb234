"""Forwards with static shapes and addresses, each size of which is recorded once as a CUDA graph.

A GPU finishes a small layer before the host has launched the next of its twenty kernels. A graph launches all of them
at once, but fixes sizes and addresses. So a block of rows is padded to one of a few sizes, its inputs are copied into
static tensors, and the KV cache lies in memory of a fixed number of slots, its capacity. The recorded attention reads
all of these slots under a mask. The last slot is spare: padding rows write to it and see nothing else, and no other row
sees it. Lanes side by side have a place each in one memory, and one forward replays the rows of all.

Where each text goes on with its most probable token, or with one that its lane draws on the device, the next forward
is launched before the host has read the token: the device takes it itself. If the next input differs, that forward is
dropped.

The network is that of `fused_llama.py`, with the same hooks. Only whole forwards of short blocks over caches with no
evicted or quantised slots are replayed; all others run as usual, and so do those of a cache for which there is no
memory. Without a GPU the same code runs, but nothing is recorded.
"""
from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.engine.attention.recorded_attention import RecordedAttention
from playground.engine.device_memory import HEADROOM
from playground.engine.graphs.fused_llama import FusedLlama
from playground.engine.graphs.graph_inputs import GraphInputs, TextRows
from playground.engine.graphs.graph_memory import GraphBuffers
from playground.engine.graphs.graph_recorders import CudaGraphRecorder, Record, Run, SideStream, run_eagerly
from playground.engine.graphs.graph_sizes import (
    BLOCK_SIZES,
    PLACES,
    Bucket,
    block_size,
    buckets,
    capacity_for,
    places_for,
)
from playground.engine.graphs.launched_ahead import Ahead, ChosenTokens, used_slots
from playground.engine.graphs.recorded_llama import recorded_forward, runs_for
from playground.engine.graphs.recorded_reading import RecordedReading
from playground.engine.hooks import Call, LayerPlan
from playground.engine.row_numbers import CANDIDATES

if TYPE_CHECKING:
    from playground.engine.attention.segment_attention import QKV, Scoring, Segment
    from playground.engine.cache.kv_cache import KVCache
    from playground.engine.forward_input import ForwardInput

log = logging.getLogger(__name__)
FREE_SHARE = (HEADROOM - 1) / 2  # of the weights' memory, which free buffers may take; the rest is for caches in use
JOINED = (2, 4)  # places for which forwards of one row are recorded at load
NOTHING: frozenset[int] = frozenset()  # captured layers


class GraphSegment:
    """Replaces the segments of a forward of static size: the layers write and attend through it."""

    def __init__(self, memory: GraphBuffers, inputs: GraphInputs):
        self.store, self._memory, self._slots = memory, memory, inputs.slots
        self._attention = RecordedAttention(inputs.seen)

    def shared_prefix(self, sliding_window: int | None) -> None:
        """None: a cache in static memory has its own copy of its prefix."""

    def attend(self, layer: int, new: QKV, scaling: float, sliding_window: int | None = None,
               scoring: Scoring | None = None) -> Tensor:
        """Attention of the new rows of a layer, [heads, places * rows, d], each over the cache at its place."""
        query, *states = new
        for memory, added in zip(self.held(layer), states):
            memory.index_copy_(1, self._slots, added)
        return self.attend_held(layer, query, scaling)

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [kv_heads, places * slots, d] each."""
        return self._memory.keys[layer], self._memory.values[layer]

    def attend_held(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attention of queries [heads, n, d] over them, of the same shape."""
        return self._attention(query, *self.held(layer), scaling)


class Outputs:
    """Static results of forwards with so many rows: logits [rows, V], and inputs of captured layers [rows, d]."""

    def __init__(self, rows: int, network: FusedLlama):
        like = network.embeddings
        exact = torch.promote_types(like.dtype, torch.float32)
        self.logits = torch.empty(rows, network.head.weight.shape[0], dtype=exact, device=like.device)
        self.captured: dict[int, Tensor] = {}

    def capturing(self, layers: Iterable[int], like: Tensor) -> None:
        for layer in layers:
            if layer not in self.captured:
                self.captured[layer] = like.new_empty(len(self.logits), like.shape[1])

    def take(self, logits: Tensor, captured: dict[int, Tensor]) -> None:
        self.logits.copy_(logits)
        for layer, states in captured.items():
            self.captured[layer].copy_(states)


class GraphReplay:
    """Recorded forwards of a fused network, by size. At most `free_bytes` of free buffers are kept for later use."""

    def __init__(self, network: FusedLlama, record: Record, free_bytes: int, record_reading: Record = run_eagerly):
        self.network, self.buffers, self.read = network, [], RecordedReading(record_reading)
        self._record, self._free_bytes = record, free_bytes
        self._has_kernels = runs_for(network)
        self._window = min((layer.window for layer in network.layers if layer.window), default=None)
        self._inputs: dict[Bucket, GraphInputs] = {}
        self._outputs: dict[int, Outputs] = {}  # by rows of all places
        self._side, self._ahead = SideStream(network.embeddings.device), None
        self._next: Ahead | None = None  # the forward after the last one, while tokens are awaited
        self._chosen = ChosenTokens(network.embeddings.device)
        self.marks = None  # begin and end, in the device's stream, of the last forward if it was launched ahead

    def fits(self, works: list[ForwardInput], segments: list[Segment], plan: LayerPlan) -> bool:
        """Whether these are short blocks over plain caches, through all layers."""
        return (
            len(works) <= PLACES[-1]
            and plan.is_whole
            and plan.routing is None
            and len({id(work.store) for work in works}) == len(works)
            and all(self._is_plain(work, segment) for work, segment in zip(works, segments))
        )

    def _is_plain(self, work: ForwardInput, segment: Segment) -> bool:
        special = work.again or work.blends or work.embeds or work.store.eager
        return not special and len(work.tokens) <= BLOCK_SIZES[-1] and segment.is_plain(self._window)

    def __call__(
        self, works: list[ForwardInput], segments: list[Segment], capture: frozenset[int] = NOTHING
    ) -> tuple[list[Tensor], dict[int, Tensor]] | None:
        """Logits [rows, V] of each work in float32 or float64, and the inputs [rows, d] of captured layers, all new.

        None if there is no memory for a buffer or a recording: the forwards of these caches then run eagerly.
        """
        try:
            return self._replayed(works, segments, capture)
        except torch.OutOfMemoryError as reason:
            log.warning("no memory for a replayed forward, so this text goes on without: %s", reason)
            for segment in segments:
                segment.store.eager = True
        self._free_unused()  # only now: the error refers to what was allocated
        return None

    def join(self) -> None:
        """Before a forward that is not replayed: a forward that was launched ahead must not write beside it."""
        if self._ahead:
            self._side.join()
        self._ahead = self._next = self.marks = None

    def _free_unused(self) -> None:
        self.buffers = [memory for memory in self.buffers if not memory.is_free()]
        if self.network.embeddings.is_cuda:
            torch.cuda.empty_cache()

    def _replayed(
        self, works: list[ForwardInput], segments: list[Segment], capture: frozenset[int]
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        if self._is_launched(works, segments, capture):
            memory, rows = self._ahead.memory, 1
            self.join()
            self.marks = self._side.marks
        else:
            self.join()
            memory, rows = self._buffers_for(segments), block_size(max(segment.rows for segment in segments))
            texts = [TextRows(work.tokens, segment, work.given) for work, segment in zip(works, segments)]
            self._run(memory, rows, {memory.place_of(text.segment.store): text for text in texts}, capture)
        places, outputs = [memory.place_of(segment.store) for segment in segments], self._outputs[memory.places * rows]
        starts = [place * rows for place in places]
        captured = {layer: torch.cat(_rows_of(outputs.captured[layer], starts, segments)) for layer in capture}
        logits = _rows_of(outputs.logits, starts, segments)
        if not capture:
            self._expect(Ahead.after(memory, works, dict(zip(places, segments))))
        return logits, captured

    def _run(self, memory: GraphBuffers, rows: int, texts: dict[int, TextRows], capture: frozenset[int]) -> None:
        inputs = self._inputs_of(Bucket(rows, memory.slots, memory.places))
        inputs.fill(texts)
        if (rows, capture) in memory.runs:
            memory.runs[rows, capture]()
        else:
            self._record_into(memory, inputs, capture)

    def _record_into(self, memory: GraphBuffers, inputs: GraphInputs, capture: frozenset[int] = NOTHING) -> None:
        self._outputs[len(inputs.ids)].capturing(capture, self.network.embeddings)
        memory.runs[inputs.size.rows, capture] = self._record(lambda: self._forward(memory, inputs, capture))

    def _forward(self, memory: GraphBuffers, inputs: GraphInputs, capture: frozenset[int] = NOTHING) -> None:
        segment, outputs = GraphSegment(memory, inputs), self._outputs[len(inputs.ids)]
        if self._has_kernels:
            return outputs.take(*recorded_forward(self.network, inputs, segment, capture))
        call = Call([segment], LayerPlan(capture=capture))
        outputs.take(self.network(inputs.positions[None], 0, call, inputs.ids[None]), call.captured)

    # --- the next forward, before the host knows its tokens ---

    def _is_launched(self, works: list[ForwardInput], segments: list[Segment], capture: frozenset[int]) -> bool:
        return self._ahead is not None and not capture and self._ahead.is_of(works, segments, self._chosen.read())

    def _expect(self, ahead: Ahead | None) -> None:
        """Launch the forward of the most probable token after each text, or wait for what other lanes draw."""
        if ahead is None:
            return
        logits = self._outputs[ahead.memory.places].logits
        if ahead.awaited:
            self._chosen.take(logits)
            self._next = ahead
        else:
            self._launch(ahead, lambda: self._chosen.take_and_copy(logits))

    def go_on(self, store: KVCache, token: Tensor) -> None:
        """The text of this cache goes on with a token [1], which only the device knows.

        If its forward is expected and the last token that was awaited, it is launched. Without memory it is not.
        """
        place = self._next.memory.place_of(store) if self._next else None
        if place is None or place not in self._next.awaited:
            return
        self._chosen.put(place, token)
        self._next.awaited.remove(place)
        if not self._next.awaited:
            ahead, self._next = self._next, None
            try:
                self._launch(ahead, self._chosen.copy)
            except torch.OutOfMemoryError as reason:
                log.warning("no memory to launch a forward ahead: %s", reason)

    def _launch(self, ahead: Ahead, choose: Run) -> None:
        """Launch a forward beside the current stream after `choose`, which sets its tokens and copies them."""
        memory = ahead.memory
        if memory.ahead is None:
            self._record_ahead(memory, self._inputs_of(Bucket(1, memory.slots, memory.places)))
        self._side(choose, memory.ahead)
        self._ahead = ahead

    def _record_ahead(self, memory: GraphBuffers, inputs: GraphInputs) -> None:
        """Record it over padding, which does not move on; the inputs are afterwards what they were."""
        outputs = self._outputs[memory.places]
        held, logits = inputs.copy(), outputs.logits.clone()
        inputs.fill({})
        memory.ahead = self._record(lambda: self._forward_ahead(memory, inputs))
        inputs.restore(held)
        outputs.logits.copy_(logits)

    def _forward_ahead(self, memory: GraphBuffers, inputs: GraphInputs) -> None:
        inputs.advance(self._chosen.on_device(memory.places))
        self._forward(memory, inputs)

    # --- recording before the first text ---

    def record_usual(self, context: int) -> None:
        """Record the usual sizes before the first text, so that no run waits for it.

        There is one buffer of each capacity, from the smallest on, as many as the share of free ones holds but at least
        one, and buffers of the smallest capacity for lanes side by side. Other sizes are recorded when they are first
        needed.
        """
        first, *others = dict.fromkeys(size.slots for size in buckets(context))
        try:
            self._record_usual(Bucket(BLOCK_SIZES[-1], first))
            self.read(self._outputs[1].logits, CANDIDATES)
            together = [Bucket(1, first, places) for places in JOINED]
            for size in [*together, *(Bucket(BLOCK_SIZES[-1], slots) for slots in others)]:
                if self._exceeds_free_share(size):
                    return
                self._record_usual(size)
        except torch.OutOfMemoryError as reason:
            log.warning("no memory to record all usual forwards: %s", reason)

    def _exceeds_free_share(self, size: Bucket) -> bool:
        first, *_ = self.buffers
        more = first.bytes * size.slots * size.places // first.slots
        return more + sum(memory.bytes for memory in self.buffers) > self._free_bytes

    def _record_usual(self, largest: Bucket) -> None:
        """Record blocks of all sizes up to the largest over a new buffer; their rows are of no text yet."""
        memory = GraphBuffers(largest.slots, self.network, largest.places)
        self.buffers.append(memory)
        for rows in BLOCK_SIZES:
            if rows <= largest.rows:
                inputs = self._inputs_of(largest._replace(rows=rows))
                inputs.fill({})
                self._record_into(memory, inputs)
        self._record_ahead(memory, self._inputs_of(largest._replace(rows=1)))

    def recorded(self) -> set[Bucket]:
        """Sizes of the forwards that are recorded."""
        return {Bucket(rows, memory.slots, memory.places) for memory in self.buffers for rows, _ in memory.runs}

    # --- memory ---

    def _buffers_for(self, segments: list[Segment]) -> GraphBuffers:
        """The memory that holds the caches of these segments if it is large enough; otherwise they are moved to one.

        Caches that were together stay so while others beside them are in use, so that lanes which take turns do not
        move.
        """
        stores, used = [segment.store for segment in segments], max(map(used_slots, segments))
        places = places_for(len(stores))
        large = [memory for memory in self.buffers if memory.slots > used and memory.places >= places]
        for memory in large:
            if all(map(memory.holds, stores)) and (memory.places == places or memory.in_use(stores)):
                return memory
        memory = self._shared(stores, large, places) or self._free(capacity_for(used), places)
        for segment in segments:
            if not memory.holds(segment.store):
                memory.take(segment.store, segment.store.slots_of(0).count + segment.first)
        self.buffers = [*self._retained(memory), memory]
        return memory

    def _shared(self, stores: list[KVCache], large: list[GraphBuffers], places: int) -> GraphBuffers | None:
        """Memory that holds some of these caches and has room for the others."""
        held = [
            memory for memory in large
            if any(map(memory.holds, stores)) and memory.has_room_for(stores)
            and (memory.places == places or memory.in_use(stores))
        ]
        return max(held, key=lambda memory: sum(map(memory.holds, stores)), default=None)

    def _free(self, slots: int, places: int) -> GraphBuffers:
        alike = (memory for memory in self.buffers if (memory.slots, memory.places) == (slots, places))
        return next((memory for memory in alike if memory.is_free()), None) or GraphBuffers(slots, self.network, places)

    def _retained(self, taken: GraphBuffers) -> list[GraphBuffers]:
        """The other buffers, without the least recently used free ones that exceed `free_bytes`.

        The smallest is kept in any case: most texts begin in it.
        """
        others = [memory for memory in self.buffers if memory is not taken]
        free = [memory for memory in reversed(others) if memory.is_free()]
        smallest, left, dropped = min(free, key=lambda memory: memory.bytes, default=None), self._free_bytes, set()
        for memory in free:
            left -= memory.bytes
            if left < 0 and memory is not smallest:
                dropped.add(id(memory))
        return [memory for memory in others if id(memory) not in dropped]

    def _inputs_of(self, size: Bucket) -> GraphInputs:
        if size not in self._inputs:
            rows = size.rows * size.places
            if rows not in self._outputs:
                self._outputs[rows] = Outputs(rows, self.network)
            self._inputs[size] = GraphInputs(size, self.network.embeddings.device)
        return self._inputs[size]


def _rows_of(results: Tensor, starts: list[int], segments: list[Segment]) -> list[Tensor]:
    """The rows of each segment among those of all places, in new tensors."""
    return [results[start:start + segment.rows].clone() for start, segment in zip(starts, segments)]


def build_graph_replay(network: FusedLlama | None) -> GraphReplay | None:
    """Graph replay for a network; None if it has no fused implementation, or is not on one CUDA device."""
    if network is None or not network.embeddings.is_cuda:
        return None
    if network.spread:
        log.info("forwards over several GPUs are not recorded: a CUDA graph holds the work of one")
        return None
    forwards, readings = (CudaGraphRecorder(network.embeddings.device) for _ in range(2))
    return GraphReplay(network, forwards, int(network.bytes * FREE_SHARE), readings)
