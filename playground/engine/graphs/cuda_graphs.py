"""Forwards with static shapes and addresses, each size of which is recorded once as a CUDA graph.

A GPU finishes a small layer before the host has launched the next of its twenty kernels. A graph launches all of them
at once, but fixes sizes and addresses. So a block of rows is padded to one of a few sizes, its inputs are copied into
static tensors, and the KV cache lies in memory of a fixed number of slots, its capacity. The recorded attention reads
all of these slots under a mask. The last slot is spare: padding rows write to it and see nothing else, and no other row
sees it.

The network is that of `fused_llama.py`, with the same hooks. Only whole forwards of one short block over one cache with
no evicted or quantised slots are replayed; all others run as usual, and so do those of a cache for which there is no
memory. Without a GPU the same code runs, but nothing is recorded.
"""
from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch import Tensor

from playground.engine.cache.kv_buffer import KVBuffer
from playground.engine.device_memory import HEADROOM
from playground.engine.graphs.fused_llama import FusedLlama
from playground.engine.hooks import Call, LayerPlan

if TYPE_CHECKING:
    from playground.engine.attention.segment_attention import Segment
    from playground.engine.cache.kv_cache import KVCache
    from playground.engine.forward_input import ForwardInput

log = logging.getLogger(__name__)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows; longer blocks keep a GPU busy without graphs
MIN_CAPACITY = 256  # slots
FREE_SHARE = (HEADROOM - 1) / 2  # of the weights' memory, which free buffers may take; the rest is for caches in use

Run = Callable[[], None]
Record = Callable[[Run], Run]
"""Runs a forward whose inputs, outputs, sizes and addresses never change; returns a function that runs it again."""


class Bucket(NamedTuple):
    """A size of a recorded forward."""

    rows: int
    slots: int


def bucket(rows: int, slots: int) -> Bucket | None:
    """The smallest size for a block of `rows` in a cache of `slots`, including the block; None if it is too long."""
    return Bucket(block_size(rows), capacity_for(slots)) if rows <= BLOCK_SIZES[-1] else None


def buckets(context: int) -> list[Bucket]:
    """All sizes for a cache of up to `context` slots."""
    sizes = [*takewhile(lambda size: size <= context, capacities()), capacity_for(context)]
    return [Bucket(rows, slots) for slots in sizes for rows in BLOCK_SIZES]


def block_size(rows: int) -> int:
    return BLOCK_SIZES[bisect_left(BLOCK_SIZES, rows)]


def capacity_for(slots: int) -> int:
    """The smallest capacity for so many slots and a spare one."""
    return next(size for size in capacities() if size > slots)


def capacities() -> Iterator[int]:
    """Two per doubling, so that there are few of them and at most a third of the slots is unused."""
    size = MIN_CAPACITY
    while True:
        yield size
        yield size * 3 // 2
        size *= 2


class GraphInputs:
    """Static inputs of a forward of one size: token ids, positions and slots to write to, [rows] each, and the mask.

    `seen` [rows, slots] is what each row may attend to. All are built on the host and copied in two transfers, which
    may still be in progress when `fill` returns.
    """

    def __init__(self, size: Bucket, device: torch.device):
        self.size = size
        pinned = device.type == "cuda"
        self._staged = (
            torch.zeros(3, size.rows, dtype=torch.long, pin_memory=pinned),
            torch.zeros(size, dtype=torch.bool, pin_memory=pinned),
        )
        self._static = [staged if device.type == "cpu" else staged.to(device) for staged in self._staged]
        (self.ids, self.positions, self.slots), self.seen = self._static
        self._copied = torch.cuda.Event() if pinned else None

    def fill(self, tokens: list[int], segment: Segment) -> None:
        """Set the inputs to the rows of a segment, followed by padding."""
        rows, trunk = segment.rows, segment.store.slots_of(0).count
        numbers, seen = self._padding(rows)
        numbers[:, :rows] = tokens, segment.positions, range(trunk + segment.first, trunk + segment.end)
        seen[:rows, :trunk] = True
        seen[:rows, trunk:trunk + segment.end] = segment.ancestors()
        self._copy()

    def fill_with_padding(self) -> None:
        """Set the inputs to rows of no text."""
        self._padding(0)
        self._copy()

    def _padding(self, first: int) -> list[numpy.ndarray]:
        """The staged inputs, with padding in the rows from `first` on, and rows before it that see nothing yet."""
        self._wait_for_copies()
        spare = self.size.slots - 1
        numbers, seen = (staged.numpy() for staged in self._staged)
        numbers[:] = [[0], [0], [spare]]
        seen[:] = False
        seen[first:, spare] = True  # some attention kernels return NaN for a row that sees nothing
        return [numbers, seen]

    def _copy(self) -> None:
        for staged, static in zip(self._staged, self._static):
            if static is not staged:
                static.copy_(staged, non_blocking=True)
        if self._copied:
            self._copied.record(torch.cuda.current_stream(self.ids.device))

    def _wait_for_copies(self) -> None:
        """Before the staged inputs are overwritten. The host has mostly read what the last forward computed by then."""
        if self._copied and not self._copied.query():
            self._copied.synchronize()


class GraphBuffers:
    """Static memory for the keys and values of one KV cache, [kv_heads, slots, d] per layer.

    `runs` are the forwards recorded over it, by rows of the block.
    """

    def __init__(self, slots: int, network: FusedLlama):
        self.slots, self.runs = slots, {}
        dtype, device = network.embeddings.dtype, network.embeddings.device
        with torch.inference_mode(False):  # ordinary tensors, which may be modified outside a forward
            self._memory = [
                torch.zeros(layer.kv_heads, slots, layer.head_dim, dtype=dtype, device=device)
                for layer in network.layers
                for _ in range(2)
            ]
        self.keys, self.values = self._memory[::2], self._memory[1::2]
        self._holder: Callable[[], KVCache | None] = lambda: None

    @property
    def bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def holds(self, store: KVCache) -> bool:
        """Whether the whole cache is still in this memory. Its buffers move out by themselves if they grow or shrink.
        """
        return self._holder() is store and len(self._inside(store)) == len(self._memory)

    def is_free(self) -> bool:
        """Whether no cache in this memory will be fed again."""
        store = self._holder()
        return store is None or store.done or not self._inside(store)

    def take(self, store: KVCache, used: int) -> None:
        """Move a cache here; its first `used` slots are in use."""
        self._clear()
        self._holder = weakref.ref(store)  # first: if a move fails, the buffers moved before it stay here
        for buffer, memory in zip(_kv_buffers(store), self._memory):
            buffer.move(memory, used)

    def _clear(self) -> None:
        """Move the previous cache out and zero the memory: masked slots must be finite, because 0 times NaN is NaN."""
        former = self._holder()
        for buffer in self._inside(former) if former else ():
            buffer.move(buffer.rows.clone(), 0)
        torch._foreach_zero_(self._memory)

    def _inside(self, store: KVCache) -> list[KVBuffer]:
        return [buffer for buffer, memory in zip(_kv_buffers(store), self._memory) if buffer.rows is memory]


def _kv_buffers(store: KVCache) -> list[KVBuffer]:
    """Keys and values in turn, layer by layer."""
    return [buffer for both in zip(store.keys, store.values) for buffer in both]


class GraphSegment:
    """Replaces a `Segment` in a forward of static size: the hooks write and mask through it."""

    # a forward that needs any of these is not replayed
    watched, needs_keys = (), False

    def __init__(self, memory: GraphBuffers, inputs: GraphInputs):
        self.rows, self._memory, self._inputs, self._bias = inputs.size.rows, memory, inputs, None

    def shared_prefix(self, sliding_window: int | None) -> None:
        """None: a cache in static memory has its own copy of its prefix."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        static = self._memory.keys[layer], self._memory.values[layer]
        for memory, new in zip(static, (keys, values)):
            memory.index_copy_(1, self._inputs.slots, new)
        return static

    def bias(self, layer: int, sliding_window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """As `Segment.bias`, [groups * rows, slots], the same for all layers."""
        if self._bias is None:
            seen = self._inputs.seen
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
            self._bias = bias.repeat(groups, 1)
        return self._bias


class GraphReplay:
    """Recorded forwards of a fused network, by size. At most `free_bytes` of free buffers are kept for later use."""

    def __init__(self, network: FusedLlama, record: Record, free_bytes: int):
        self.network, self.buffers = network, []
        self._record, self._free_bytes = record, free_bytes
        self._window = min((layer.window for layer in network.layers if layer.window), default=None)
        self._inputs: dict[Bucket, GraphInputs] = {}
        self._logits: dict[int, Tensor] = {}  # [rows, V], by rows

    def fits(self, works: list[ForwardInput], segments: list[Segment], plan: LayerPlan) -> bool:
        """Whether this is one short block over one plain cache, through all layers."""
        work, *others = works
        alone = not (others or work.again or work.blends or work.embeds or work.store.eager) and plan == LayerPlan()
        return alone and len(work.tokens) <= BLOCK_SIZES[-1] and segments[0].is_plain(self._window)

    def __call__(self, tokens: list[int], segment: Segment) -> Tensor | None:
        """Logits [rows, V] in float32 or float64, in a new tensor.

        None if there is no memory for a buffer or a recording: the forwards of this cache then run eagerly.
        """
        try:
            return self._replayed(tokens, segment)
        except torch.OutOfMemoryError as reason:
            log.warning("no memory for a replayed forward, so this text goes on without: %s", reason)
            segment.store.eager = True
        self._free_unused()  # only now: the error refers to what was allocated
        return None

    def _free_unused(self) -> None:
        self.buffers = [memory for memory in self.buffers if not memory.is_free()]
        if self.network.embeddings.is_cuda:
            torch.cuda.empty_cache()

    def _replayed(self, tokens: list[int], segment: Segment) -> Tensor:
        memory = self._buffers_for(segment)
        size = Bucket(block_size(segment.rows), memory.slots)
        inputs = self._inputs_of(size)
        inputs.fill(tokens, segment)
        if size.rows in memory.runs:
            memory.runs[size.rows]()
        else:
            self._record_into(memory, inputs)
        return self._logits[size.rows][:segment.rows].clone()

    def _record_into(self, memory: GraphBuffers, inputs: GraphInputs) -> None:
        memory.runs[inputs.size.rows] = self._record(lambda: self._forward(memory, inputs))

    def record_usual(self, context: int) -> None:
        """Record the usual sizes before the first text, so that no run waits for it.

        There is one buffer of each capacity, from the smallest on, as many as the share of free ones holds but at least
        one. Other sizes are recorded when they are first needed.
        """
        try:
            for slots in dict.fromkeys(size.slots for size in buckets(context)):
                memory = GraphBuffers(slots, self.network)
                if self.buffers and memory.bytes + sum(other.bytes for other in self.buffers) > self._free_bytes:
                    return
                self.buffers.append(memory)
                self._record_padding(memory)
        except torch.OutOfMemoryError as reason:
            log.warning("no memory to record all usual forwards: %s", reason)

    def _record_padding(self, memory: GraphBuffers) -> None:
        """Record blocks of all sizes over a buffer; their rows are of no text yet."""
        for rows in BLOCK_SIZES:
            inputs = self._inputs_of(Bucket(rows, memory.slots))
            inputs.fill_with_padding()
            self._record_into(memory, inputs)

    def recorded(self) -> set[Bucket]:
        """Sizes of the forwards that are recorded."""
        return {Bucket(rows, memory.slots) for memory in self.buffers for rows in memory.runs}

    def _forward(self, memory: GraphBuffers, inputs: GraphInputs) -> None:
        call = Call([GraphSegment(memory, inputs)])
        logits = self.network(inputs.positions[None], 0, call, inputs.ids[None])
        self._logits[inputs.size.rows].copy_(logits)

    def _buffers_for(self, segment: Segment) -> GraphBuffers:
        """The memory that holds the segment's cache if it is large enough; otherwise the cache is moved to another."""
        store, trunk = segment.store, segment.store.slots_of(0).count
        used = trunk + segment.end
        here = next((memory for memory in self.buffers if memory.slots > used and memory.holds(store)), None)
        if here:
            return here
        slots = capacity_for(used)
        free = next((memory for memory in self.buffers if memory.slots == slots and memory.is_free()), None)
        memory = free or GraphBuffers(slots, self.network)
        memory.take(store, trunk + segment.first)
        self.buffers = [*self._retained(memory), memory]
        return memory

    def _retained(self, taken: GraphBuffers) -> list[GraphBuffers]:
        """The other buffers, without the least recently used free ones that exceed `free_bytes`."""
        others, left, retained = [memory for memory in self.buffers if memory is not taken], self._free_bytes, []
        for memory in reversed(others):
            left -= memory.bytes if memory.is_free() else 0
            if left >= 0 or not memory.is_free():
                retained.append(memory)
        return retained[::-1]

    def _inputs_of(self, size: Bucket) -> GraphInputs:
        if size not in self._inputs:
            like = self.network.embeddings
            exact = torch.promote_types(like.dtype, torch.float32)
            self._logits.setdefault(
                size.rows, torch.empty(size.rows, self.network.head.weight.shape[0], dtype=exact, device=like.device)
            )
            self._inputs[size] = GraphInputs(size, like.device)
        return self._inputs[size]


def build_graph_replay(network: FusedLlama | None) -> GraphReplay | None:
    """Graph replay for a network; None if it has no fused implementation, or is not on one CUDA device."""
    if network is None or not network.embeddings.is_cuda:
        return None
    if network.spread:
        log.info("forwards over several GPUs are not recorded: a CUDA graph holds the work of one")
        return None
    return GraphReplay(network, CudaGraphRecorder(network.embeddings.device), int(network.bytes * FREE_SHARE))


def run_eagerly(run: Run) -> Run:
    """A `Record` for devices without graphs."""
    run()
    return run


class CudaGraphRecorder:
    """Records CUDA graphs. They share a memory pool for intermediate results, because only one runs at a time."""

    def __init__(self, device: torch.device):
        self._device, self._pool, self._stream = device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            # around both, so that a failed capture leaves the current stream as it was
            with torch.cuda.stream(self._stream):
                run()  # warm-up: libraries allocate workspaces and kernels are loaded at the first call
                self._capture(graph, run)
            torch.cuda.current_stream().wait_stream(self._stream)
            graph.replay()  # capture does not execute
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Run) -> None:
        """As `torch.cuda.graph`, which would wait for all streams of the device, those of other threads too."""
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # ending a failed capture fails too, and says less
                graph.capture_end()
            raise
        graph.capture_end()
