"""Static memory for the key and value states of KV caches whose forwards are recorded."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from playground.engine.cache.kv_buffer import KVBuffer

if TYPE_CHECKING:
    from playground.engine.cache.kv_cache import KVCache
    from playground.engine.graphs.fused_llama import FusedLlama
    from playground.engine.graphs.graph_recorders import Run


class GraphBuffers:
    """Static memory for the keys and values of a few KV caches, each in a place of its own.

    A layer has [kv_heads, places * slots, d]. `runs` are the forwards recorded over it, by rows of a place and by the
    layers whose inputs they capture; `ahead` is the one that chooses its own tokens.
    """

    def __init__(self, slots: int, network: FusedLlama, places: int = 1):
        self.slots, self.places = slots, places
        self.runs: dict[tuple[int, frozenset[int]], Run] = {}
        self.ahead: Run | None = None
        dtype, self.device = network.embeddings.dtype, network.embeddings.device
        with torch.inference_mode(False):  # ordinary tensors, which may be modified outside a forward
            self._memory = [
                torch.zeros(layer.kv_heads, places * slots, layer.head_dim, dtype=dtype, device=self.device)
                for layer in network.layers
                for _ in range(2)
            ]
            self._views = [
                [memory[:, place * slots:(place + 1) * slots] for memory in self._memory] for place in range(places)
            ]
        self.keys, self.values = self._memory[::2], self._memory[1::2]
        self._holders: list[Callable[[], KVCache | None]] = [lambda: None] * places

    @property
    def bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def place_of(self, store: KVCache) -> int | None:
        """Where the whole cache is in this memory. Its buffers move out by themselves if they grow or shrink."""
        for place, holder in enumerate(self._holders):
            if holder() is store:
                return place if len(self._inside(place)) == len(self._memory) else None
        return None

    def holds(self, store: KVCache) -> bool:
        return self.place_of(store) is not None

    def is_free(self) -> bool:
        """Whether no cache in this memory will be fed again."""
        return not self.in_use()

    def in_use(self, besides: Iterable[KVCache] = ()) -> bool:
        """Whether a cache in this memory, other than these, may be fed again."""
        others = {id(store) for store in besides}
        return any(not self._is_free(place) and id(self._holders[place]()) not in others
                   for place in range(self.places))

    def has_room_for(self, stores: list[KVCache]) -> bool:
        """Whether there is a free place for each of these caches that is not inside."""
        return sum(self._is_free(place) for place in range(self.places)) >= sum(not self.holds(s) for s in stores)

    def take(self, store: KVCache, used: int) -> None:
        """Move a cache to a free place; its first `used` slots are in use."""
        place = next(place for place in range(self.places) if self._is_free(place) or self._holders[place]() is store)
        self._clear(place)
        self._holders[place] = weakref.ref(store)  # first: if a move fails, the buffers moved before it stay here
        for buffer, memory in zip(_kv_buffers(store), self._views[place]):
            buffer.move(memory, used)

    def _is_free(self, place: int) -> bool:
        store = self._holders[place]()
        return store is None or store.done or not self._inside(place)

    def _clear(self, place: int) -> None:
        """Move the previous cache out and zero the memory: masked slots must be finite, because 0 times NaN is NaN."""
        for buffer in self._inside(place):
            buffer.move(buffer.rows.clone(), 0)
        torch._foreach_zero_(self._views[place])

    def _inside(self, place: int) -> list[KVBuffer]:
        """Buffers of the cache at a place that are still there."""
        store = self._holders[place]()
        if store is None:
            return []
        return [buffer for buffer, memory in zip(_kv_buffers(store), self._views[place]) if buffer.rows is memory]


def _kv_buffers(store: KVCache) -> list[KVBuffer]:
    """Keys and values in turn, layer by layer."""
    return [buffer for both in zip(store.keys, store.values) for buffer in both]
