"""Forwards that are run over and over in the same memory, so that a GPU records each size of them once, as a CUDA
graph.

A GPU is done with a small layer before the host has launched the next of its twenty kernels. A graph launches all of
them at once, but knows only sizes and addresses. So a block of rows is padded to one of a few sizes, what it reads is
copied into buffers that stay, and the keys and values of its store lie in a room: memory of a fixed number of slots,
all of which the recorded attention looks at, under a mask. The last slot is spare. Padding writes there and sees
nothing else; no row sees it.

The network is the lean one of `fast.py`, fed through the same seams. Only whole forwards of one block over one full
cache come this way; all others are left to the ways that know no sizes. Without a GPU the same runs, only that nothing
is recorded.
"""
from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.engine.fused_llama import FusedLlama
from playground.engine.hooks import Call, LayerPlan
from playground.engine.kv_buffer import KVBuffer

if TYPE_CHECKING:
    from playground.engine.attention_mask import Segment
    from playground.engine.forward_input import ForwardInput
    from playground.engine.kv_cache import KVCache

ROWS = (1, 2, 4, 8, 16, 32, 64)  # of a block; longer ones keep a GPU busy without being recorded
SMALLEST = 256  # slots of a room
SHARE = 8  # rooms that nobody is in are kept for later while they take at most this part of the weights' memory

Run = Callable[[], None]
Record = Callable[[Run], Run]
"""Carries out a forward whose inputs, outputs, sizes and addresses never change, and returns what carries it out again.
"""


class Bucket(NamedTuple):
    """A size of which a forward is recorded."""

    rows: int
    slots: int


def bucket(rows: int, slots: int) -> Bucket | None:
    """The smallest size for a block of `rows` and a cache of `slots`, the block's own among them; None where the block
    is too long.
    """
    return Bucket(block_size(rows), room_size(slots)) if rows <= ROWS[-1] else None


def buckets(context: int) -> list[Bucket]:
    """All sizes there are for a cache of up to `context` slots."""
    rooms = [*takewhile(lambda size: size <= context, room_sizes()), room_size(context)]
    return [Bucket(rows, slots) for slots in rooms for rows in ROWS]


def block_size(rows: int) -> int:
    return ROWS[bisect_left(ROWS, rows)]


def room_size(slots: int) -> int:
    """Of the smallest room for so many slots and a spare one."""
    return next(size for size in room_sizes() if size > slots)


def room_sizes() -> Iterator[int]:
    """Two to every doubling, so that there are few, and no more than a third of a room is empty."""
    size = SMALLEST
    while True:
        yield size
        yield size * 3 // 2
        size *= 2


class Buffers:
    """What a forward of one size reads: token ids, positions and slots to write to, [rows] each, and what each row
    sees, [rows, slots].

    It is put together on the host and copied in two pieces. A copy may still be under way when `fill` returns, so the
    device has to have caught up before the next one, as it has after every forward.
    """

    def __init__(self, size: Bucket, device: torch.device):
        self.size = size
        pinned = device.type == "cuda"
        self._staged = (
            torch.zeros(3, size.rows, dtype=torch.long, pin_memory=pinned),
            torch.zeros(size, dtype=torch.bool, pin_memory=pinned),
        )
        self._held = [staged if device.type == "cpu" else staged.to(device) for staged in self._staged]
        (self.ids, self.positions, self.slots), self.seen = self._held

    def fill(self, tokens: list[int], segment: Segment) -> None:
        """A segment's rows, and padding behind them."""
        rows, trunk, spare = segment.rows, segment.store.slots_of(0).count, self.size.slots - 1
        numbers, seen = (staged.numpy() for staged in self._staged)
        numbers[:] = [[0], [0], [spare]]
        numbers[:, :rows] = tokens, segment.positions(), range(trunk + segment.first, trunk + segment.end)
        seen[:] = False
        seen[:rows, :trunk] = True
        seen[:rows, trunk:trunk + segment.end] = segment.ancestors()
        seen[rows:, spare] = True  # where nothing is seen, some attentions give no number
        for staged, held in zip(self._staged, self._held):
            if held is not staged:
                held.copy_(staged, non_blocking=True)


class GraphBuffers:
    """Keys and values of one store in every layer, [kv_heads, slots, d], and what was recorded over them, by the rows
    of the block.
    """

    def __init__(self, slots: int, network: FusedLlama):
        self.slots, self.runs = slots, {}
        # ordinary tensors, so that what they hold can be moved about outside a forward
        with torch.inference_mode(False):
            self._memory = [
                torch.zeros(
                    layer.kv_heads, slots, layer.width, dtype=network.embeddings.dtype, device=network.embeddings.device
                )
                for layer in network.layers
                for _ in range(2)
            ]
        self.keys, self.values = self._memory[::2], self._memory[1::2]
        self._holder: Callable[[], KVCache | None] = lambda: None

    @property
    def bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def holds(self, store: KVCache) -> bool:
        """Whether all of the store lies here still: its pools leave by themselves where they grow or shrink."""
        return self._holder() is store and len(self._inside(store)) == len(self._memory)

    def is_free(self) -> bool:
        """Whether nobody is here for whom something will still be fed."""
        store = self._holder()
        return store is None or store.done or not self._inside(store)

    def let_in(self, store: KVCache, used: int) -> None:
        """Make this the memory of a store, whose first `used` slots are in use."""
        self._clear()
        for pool, memory in zip(_pools(store), self._memory):
            pool.move(memory, used)
        self._holder = weakref.ref(store)

    def _clear(self) -> None:
        """Whoever is here still goes elsewhere, and leaves nothing: a slot that nobody sees must still hold numbers,
        for 0 times NaN is NaN.
        """
        former = self._holder()
        for pool in self._inside(former) if former else ():
            pool.move(pool.rows.clone(), 0)
        torch._foreach_zero_(self._memory)

    def _inside(self, store: KVCache) -> list[KVBuffer]:
        return [pool for pool, memory in zip(_pools(store), self._memory) if pool.rows is memory]


def _pools(store: KVCache) -> list[KVBuffer]:
    """Keys and values in turn, layer by layer."""
    return [pool for both in zip(store.keys, store.values) for pool in both]


class Seat:
    """Stands for the segment of a store in a forward whose sizes never change: the seams write and mask through it."""

    # rows that any of this is wanted of do not come this way
    watched, renumbers, focused, asks = (), False, False, False

    def __init__(self, room: GraphBuffers, buffers: Buffers):
        self.rows, self._room, self._buffers, self._bias = buffers.size.rows, room, buffers, None

    def shares(self, sliding_window: int | None) -> None:
        """Whoever goes into a room takes everything along."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        held = self._room.keys[layer], self._room.values[layer]
        for memory, new in zip(held, (keys, values)):
            memory.index_copy_(1, self._buffers.slots, new)
        return held

    def bias(self, layer: int, sliding_window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """As `Segment.bias`, [groups * rows, slots], one for all layers."""
        if self._bias is None:
            seen = self._buffers.seen
            self._bias = (
                torch.zeros(seen.shape, dtype=dtype, device=seen.device)
                .masked_fill_(~seen, float("-inf"))
                .repeat(groups, 1)
            )
        return self._bias


class GraphReplay:
    """Forwards of a lean network by size. `kept` bytes of rooms that nobody is in stay for later."""

    def __init__(self, network: FusedLlama, record: Record, kept: int):
        self.network, self.rooms = network, []
        self._record, self._kept = record, kept
        self._window = min((layer.window for layer in network.layers if layer.window), default=None)
        self._buffers: dict[Bucket, Buffers] = {}
        self._logits: dict[int, Tensor] = {}  # [rows, V], by rows

    def fits(self, works: list[ForwardInput], segments: list[Segment], plan: LayerPlan) -> bool:
        """Whether this is one short block over one full cache, through all layers."""
        work, *others = works
        alone = not (others or work.again or work.blends) and plan == LayerPlan()
        return alone and len(work.tokens) <= ROWS[-1] and segments[0].is_plain(self._window)

    def __call__(self, tokens: list[int], segment: Segment) -> Tensor:
        """Logits [rows, V], in float32 or better, in memory of their own."""
        room = self._room(segment)
        size = Bucket(block_size(segment.rows), room.slots)
        buffers = self._buffers_of(size)
        buffers.fill(tokens, segment)
        if size.rows in room.runs:
            room.runs[size.rows]()
        else:
            room.runs[size.rows] = self._record(lambda: self._forward(room, buffers))
        return self._logits[size.rows][:segment.rows].clone()

    def recorded(self) -> set[Bucket]:
        """Sizes of which some room has a recorded forward."""
        return {Bucket(rows, room.slots) for room in self.rooms for rows in room.runs}

    def _forward(self, room: GraphBuffers, buffers: Buffers) -> None:
        logits = self.network(buffers.positions[None], 0, Call([Seat(room, buffers)]), buffers.ids[None])
        self._logits[buffers.size.rows].copy_(logits)

    def _room(self, segment: Segment) -> GraphBuffers:
        """Where the store is, if there is place for the segment, or where it now goes."""
        store, trunk = segment.store, segment.store.slots_of(0).count
        here = next((room for room in self.rooms if room.slots > trunk + segment.end and room.holds(store)), None)
        if here:
            return here
        slots = room_size(trunk + segment.end)
        room = next((room for room in self.rooms if room.slots == slots and room.is_free()), None) or GraphBuffers(
            slots, self.network
        )
        room.let_in(store, trunk + segment.first)
        self.rooms = [*self._worth_keeping(room), room]
        return room

    def _worth_keeping(self, taken: GraphBuffers) -> list[GraphBuffers]:
        """The other rooms, without the free ones that were taken longest ago and are too much together."""
        others, left, kept = [room for room in self.rooms if room is not taken], self._kept, []
        for room in reversed(others):
            left -= room.bytes if room.is_free() else 0
            if left >= 0 or not room.is_free():
                kept.append(room)
        return kept[::-1]

    def _buffers_of(self, size: Bucket) -> Buffers:
        if size not in self._buffers:
            like = self.network.embeddings
            self._buffers[size] = Buffers(size, like.device)
            exact = torch.promote_types(like.dtype, torch.float32)
            self._logits.setdefault(
                size.rows, torch.empty(size.rows, self.network.head.weight.shape[0], dtype=exact, device=like.device)
            )
        return self._buffers[size]


def replay_path(network: FusedLlama | None) -> GraphReplay | None:
    """The recorded way through a network; None where there is no lean one to record, or no CUDA device."""
    if network is None or not network.embeddings.is_cuda:
        return None
    return GraphReplay(network, Graphs(network.embeddings.device), network.bytes // SHARE)


def at_once(run: Run) -> Run:
    """Stands for a recording where there is nothing to record with."""
    run()
    return run


class Graphs:
    """Records CUDA graphs. What they need between input and output is shared, for only one runs at a time and nothing
    of it lasts.
    """

    def __init__(self, device: torch.device):
        self._device, self._memory, self._aside = device, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            self._aside.wait_stream(torch.cuda.current_stream())
            # around both, so that a recording that fails leaves the stream as it was
            with torch.cuda.stream(self._aside):
                run()  # libraries take their work space, and kernels are loaded, at the first call
                with torch.cuda.graph(graph, pool=self._memory, stream=self._aside, capture_error_mode="thread_local"):
                    run()
            torch.cuda.current_stream().wait_stream(self._aside)
            graph.replay()  # what is recorded has not been carried out
        return graph.replay
