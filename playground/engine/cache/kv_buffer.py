"""Memory for the key states, or the value states, of one layer.

The oldest slots may be quantised, shared with other buffers, or held head by head where heads hold different numbers of
tokens. All others are held as they were written.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from playground.engine.cache.ragged_rows import RaggedRows
from playground.engine.host_copies import on_device

GROWTH = 64  # a buffer grows by a multiple of so many slots
TAIL = 16  # slots allocated after those that are held head by head


class Capacity(NamedTuple):
    """Expected size of a buffer in slots, without the scratch."""

    expected: int = 0  # allocated when the first row arrives
    limit: float = math.inf


UNKNOWN = Capacity()


class QuantisedRows(Protocol):
    """Quantised states of the oldest slots, as a cache policy encoded them."""

    count: int  # slots
    bytes: int

    def unpack(self, room: int = 0) -> Tensor:
        """Dequantise into a new tensor [kv_heads, count + room, d]. The last `room` slots are left for the caller."""


Encode = Callable[[Tensor, "QuantisedRows | None"], QuantisedRows]
"""encode(states [kv_heads, n, d], what was quantised before) -> all of it, quantised"""


@dataclass(frozen=True)
class SlotOrder:
    """Slots that stay, in order. One object serves the keys and values of all layers with the same slots."""

    slots: Tensor  # [1 or kv_heads, n]
    counts: list[int] = field(default_factory=list)  # of each head, those that hold a token: its first ones
    _rows: dict = field(default_factory=dict)

    @property
    def is_ragged(self) -> bool:
        """Whether some heads hold fewer tokens than others."""
        return len(set(self.counts)) > 1

    def held(self, memory: Tensor) -> Tensor:
        """Indices into memory [heads, slots, d] of the tokens that are held, head by head."""
        key = memory.shape[1], memory.device
        if key not in self._rows:
            each = [own[:count] for own, count in zip(self.slots + self._starts(memory.shape[1]), self.counts)]
            self._rows[key] = torch.cat(each).to(memory.device)
        return self._rows[key]

    def _starts(self, slots: int) -> Tensor:
        """Where each head's slots start, [heads, 1]."""
        return slots * torch.arange(len(self.slots), device=self.slots.device)[:, None]

    def rows(self, memory: Tensor, offset: int, appended: range = range(0), spare: int = 0) -> Tensor:
        """Indices into a buffer's memory [heads, capacity, d] of the slots after the first `offset`, head by head.

        In each head the slots `appended` follow, and `spare` arbitrary ones. Buffers of one size share the result.
        """
        key = len(memory), memory.shape[1], offset, appended, spare, memory.device
        if key not in self._rows:
            starts, tail = _heads_and_tails(*key)
            self._rows[key] = torch.cat([self.slots[:, offset:].to(memory.device) + starts, tail], 1).flatten()
        return self._rows[key]

    def keeps_first(self, count: int) -> bool:
        """Whether the first `count` slots stay in place."""
        first = torch.arange(count, device=self.slots.device)
        return self.slots.shape[1] >= count and bool((self.slots[:, :count] == first).all())


@lru_cache(maxsize=64)
def _heads_and_tails(
    heads: int, capacity: int, offset: int, appended: range, spare: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where each head's rows start in a buffer's memory, [heads, 1], and the rows after those that stay, [heads, m].

    Cached, because a full cache evicts a token per step: all its layers need the same result at every step.
    """
    with torch.inference_mode(False):
        starts = capacity * torch.arange(heads, device=device)[:, None] - offset
        return starts, on_device([*appended, *[offset] * spare], device, torch.long) + starts


class MergeMap(NamedTuple):
    """Which slots of one layer are merged into which; several may be merged into one."""

    sources: tuple[Tensor, Tensor]  # head and slot of each source, [m], head by head
    into: Tensor  # index of its target, [m]
    targets: tuple[Tensor, Tensor]  # head and slot of each target, [k]

    @classmethod
    def of(cls, sources: tuple[Tensor, Tensor], slots: Tensor, count: int) -> MergeMap:
        """Each source is merged into one of `slots` [m] of its own head, which has `count` slots."""
        targets, into = (sources[0] * count + slots).unique(return_inverse=True)
        return cls(sources, into, (targets // count, targets % count))

    def to(self, device: torch.device) -> MergeMap:
        """The same on the device of a layer."""
        sources, targets = (tuple(part.to(device) for part in both) for both in (self.sources, self.targets))
        return MergeMap(sources, self.into.to(device), targets)


class MergedTokens(NamedTuple):
    """Tokens that were merged into others, head by head."""

    heads: Tensor  # [m]
    sources: Tensor  # positions, [m]
    targets: Tensor

    @classmethod
    def of(cls, merges: MergeMap, positions: Tensor) -> MergedTokens:
        """A merge map with slots replaced by their positions, [kv_heads, slots]."""
        return cls(merges.sources[0], positions[merges.sources], positions[merges.targets][merges.into])

    def by_head(self, heads: int) -> list[list[tuple[int, int]]]:
        """For each head, the positions (source, target) of its merged tokens."""
        counts = self.heads.bincount(minlength=heads).tolist()
        each = zip(self.sources.split(counts), self.targets.split(counts))
        return [list(zip(sources.tolist(), targets.tolist())) for sources, targets in each]


def selected_indices(mask: Tensor, counts: list[int] | None = None) -> Tensor:
    """Indices of the true entries of each row of a mask [rows, slots], ascending, [rows, most].

    A row with fewer entries than others is padded with indices of false ones. `counts` are the entries of each row, if
    known.
    """
    counts = mask.sum(1).tolist() if counts is None else counts
    if mask.is_cpu and min(counts) == max(counts):  # a GPU would wait for the number of entries
        return mask.nonzero()[:, 1].view(len(mask), counts[0])
    return (~mask).byte().argsort(dim=1, stable=True)[:, :max(counts)]


class KVBuffer:
    """States [kv_heads, slots, d], keys or values.

    Memory is allocated when the first row arrives. It grows by half as long as `capacity` allows, and shrinks when less
    than half of it is used.
    """

    def __init__(self, capacity: Capacity = UNKNOWN) -> None:
        self.capacity = capacity
        self.rows: Tensor | None = None  # as written, [kv_heads, allocated slots, d]
        self.quantised_rows: QuantisedRows | None = None  # the slots before them, or
        self.prefix: Tensor | None = None  # those shared with other buffers, [kv_heads, slots, d]: read-only; or
        self.ragged: RaggedRows | None = None  # those of heads that hold different numbers of tokens: replaced only

    @property
    def quantised_slots(self) -> int:
        return self.quantised_rows.count if self.quantised_rows else 0

    @property
    def common(self) -> int:
        """Slots shared with other buffers."""
        return 0 if self.prefix is None else self.prefix.shape[1]

    @property
    def offset(self) -> int:
        """Slots before `rows`."""
        return self.quantised_slots + self.common + (self.ragged.count if self.ragged else 0)

    @property
    def heads(self) -> int:
        """KV heads; 0 before the first row."""
        if self.ragged:
            return len(self.ragged.counts)
        rows = self.rows if self.prefix is None else self.prefix
        return 0 if rows is None else rows.shape[0]

    def start_from(self, rows: Tensor, shared: bool) -> None:
        """Begin with these rows [kv_heads, n, d], shared with other buffers or copied."""
        if shared:
            self.prefix = rows
        else:
            self.write(0, rows)

    def twin(self, slots: int, heads: Tensor | None = None) -> KVBuffer:
        """A buffer with the first `slots` rows that changes on its own: of all heads, or of copies of these heads [n].
        """
        twin = KVBuffer(self.capacity)
        if heads is not None and not self.quantised_rows:
            if slots:
                own = self.read(slots)
                twin.write_suffix(0, own[heads.to(own.device)])
            return twin
        twin.quantised_rows, twin.ragged = self.quantised_rows, self.ragged  # replaced, never changed
        if self.ragged and slots == self.ragged.count:
            return twin
        before = self.offset - self.common
        if slots - before:
            twin.write_suffix(before, self.rows[:, :slots - before] if before else self.read(slots))
        return twin

    def write(self, at: int, rows: Tensor) -> Tensor:
        """Write rows [kv_heads, n, d] from slot `at` on; returns all slots up to and including them."""
        return self._with_offset(self.write_suffix(at, rows))

    def write_suffix(self, at: int, rows: Tensor) -> Tensor:
        """As `write`, but returns only the slots that are neither quantised nor shared."""
        if self.ragged and at < self.ragged.count:
            self._spread_out()
        start, count = at - self.offset, rows.shape[1]
        if self.rows is None or start + count > self.rows.shape[1]:
            self._grow(start + count, rows)
        self.rows.narrow(1, start, count).copy_(rows)
        return self.rows.narrow(1, 0, start + count)

    def read(self, slots: int) -> Tensor:
        """The first `slots` rows, [kv_heads, slots, d].

        A view if nothing comes before the buffer's own rows, or if all of them are shared.
        """
        exact = slots - self.offset
        if self.ragged and not exact:
            return self.ragged.unpack()
        return self._with_offset(self.rows.narrow(1, 0, exact)) if exact or self.prefix is None else self.prefix

    def _with_offset(self, own: Tensor) -> Tensor:
        """Own rows, after those that are quantised, shared or held head by head."""
        if self.prefix is not None:
            return torch.cat([self.prefix, own], 1)
        packed = self.quantised_rows or self.ragged
        if not packed:
            return own
        rows = packed.unpack(own.shape[1])
        rows[:, packed.count:] = own
        return rows

    def _grow(self, needed: int, like: Tensor) -> None:
        allocated = 0 if self.rows is None else self.rows.shape[1]
        first = TAIL if self.ragged else self.capacity.expected + GROWTH - self.offset
        target, step = allocated + allocated // 2 if allocated else first, TAIL if self.ragged else GROWTH
        limit = self.capacity.limit - self.offset
        # the scratch may exceed the limit
        size = -(-max(needed, min(target, limit) if needed <= limit else target) // step) * step
        with torch.inference_mode(False):  # an ordinary tensor, which may be modified outside a forward
            new = torch.empty(like.shape[0], size, like.shape[2], dtype=like.dtype, device=like.device)
        if allocated:
            new[:, :allocated] = self.rows
        self.rows = new

    def move(self, into: Tensor, used: int) -> None:
        """Move the first `used` slots to other memory, [kv_heads, allocated slots, d]; none of them is quantised."""
        if used:
            into[:, :used] = self.read(used)
        self.rows, self.prefix, self.ragged = into, None, None

    def reorder(self, start: int, chosen: Tensor) -> None:
        """Move slots start + chosen [n], in this order, to the slots from `start` on."""
        if self.rows is not None:
            rows = self.rows[:, start - self.offset:]
            rows[:, :len(chosen)] = rows.index_select(1, chosen.to(rows.device))

    def compact(self, order: SlotOrder, trunk: int, scratch: int) -> None:
        """Keep only the slots of `order` among the first `trunk`, and move the scratch up behind them.

        If a quantised slot is evicted, the others are dequantised. A shared prefix stays shared if its remaining slots
        are its first ones; otherwise they are copied. If some heads keep fewer slots than others, no memory is held for
        those they lack.
        """
        if self.rows is None and self.prefix is None and self.ragged is None:
            return
        if order.is_ragged:
            self._pack(order, trunk, scratch)
            return
        self._spread_out()
        if len(order.slots) > 1 and not self.offset:
            self._compact_into_new(order, range(trunk, trunk + scratch))
            return
        tail = self.rows[:, trunk - self.offset:trunk - self.offset + scratch].clone() if scratch else None
        if self.offset and not order.keeps_first(self.offset):
            self._shorten_prefix(order, trunk + scratch)
        if self.rows is None:
            return
        remaining = self._select(order)
        count = remaining.shape[1]
        self.rows[:, :count] = remaining
        if scratch:
            self.rows[:, count:count + scratch] = tail
        self._shrink(count + scratch)

    def _pack(self, order: SlotOrder, trunk: int, scratch: int) -> None:
        """Hold the slots of `order` head by head, and the scratch behind them."""
        with torch.inference_mode(False):
            states = self.read(trunk + scratch)
            held = states.reshape(-1, states.shape[2]).index_select(0, order.held(states))
            tail = states[:, trunk:].clone() if scratch else None
        self.quantised_rows = self.prefix = self.rows = None
        self.ragged = RaggedRows(held, order.counts)
        if scratch:
            self.write_suffix(self.offset, tail)

    def _spread_out(self) -> None:
        """Hold slots that were held head by head in own rows."""
        if self.ragged:
            self._copy_prefix(self.offset + (0 if self.rows is None else self.rows.shape[1]))

    def _compact_into_new(self, order: SlotOrder, appended: range) -> None:
        """Compact into new memory if heads keep different slots, so that no row is copied twice.

        At least one slot is left free.
        """
        used = order.slots.shape[1] + len(appended)
        with torch.inference_mode(False):
            self.rows = self._select(order, appended, GROWTH - used % GROWTH)

    def _select(self, order: SlotOrder, appended: range = range(0), spare: int = 0) -> Tensor:
        """Own rows by their order, then the slots `appended`, then `spare` arbitrary ones, [kv_heads, n, d].

        `index_select` copies whole rows; `gather` would copy element by element.
        """
        heads, _, d = self.rows.shape
        rows = order.rows(self.rows, self.offset, appended, spare)
        return self.rows.reshape(-1, d).index_select(0, rows).view(heads, -1, d)

    def _shorten_prefix(self, order: SlotOrder, used: int) -> None:
        """Prepare for the eviction of quantised or shared slots."""
        count = order.slots.shape[1]
        if self.prefix is not None and count < self.common and order.keeps_first(count):
            self.prefix = self.prefix[:, :count] if count else None
        else:
            self._copy_prefix(used)

    def _copy_prefix(self, used: int) -> None:
        """Hold all `used` slots in own rows: neither quantised nor shared, and equally many of every head."""
        held = self.read(used)
        self.quantised_rows = self.prefix = self.ragged = None
        self._grow(used, held)
        self.rows[:, :used] = held

    def merge(self, merges: MergeMap, added: Tensor, kept: Tensor) -> None:
        """Each target becomes `kept` [k] times itself plus `added` [m] times its sources. No other row changes.

        None of the slots is quantised.
        """
        self._spread_out()
        merges, added, kept = merges.to(self.rows.device), added.to(self.rows.device), kept.to(self.rows.device)
        wide = torch.promote_types(self.rows.dtype, torch.float32)
        total = self.rows[merges.targets].to(wide) * kept[:, None].to(wide)
        total.index_add_(0, merges.into, self.rows[merges.sources].to(wide) * added[:, None].to(wide))
        self.rows[merges.targets] = total.to(self.rows.dtype)

    def quantise(self, count: int, used: int, encode: Encode) -> None:
        """Quantise the oldest `count` rows in full precision; `used` slots are in use."""
        self._spread_out()
        exact = used - self.quantised_slots
        self.quantised_rows = encode(self.rows[:, :count], self.quantised_rows)
        self.rows[:, :exact - count] = self.rows[:, count:exact].clone()
        self._shrink(exact - count)

    def _shrink(self, used: int) -> None:
        if self.rows.shape[1] > 2 * used + GROWTH:
            self.rows = self.rows[:, :used + GROWTH].clone()

    def bytes(self, slots: int) -> int:
        """Memory of the first `slots` slots; quantised ones count at their quantised size."""
        if self.ragged:
            row = len(self.ragged.counts) * self.ragged.held.shape[1] * self.ragged.held.element_size()
            return self.ragged.bytes + (slots - self.ragged.count) * row
        rows = self.rows if self.prefix is None else self.prefix
        if rows is None:
            return 0
        row = len(rows) * rows.shape[2] * rows.element_size()
        quantised = self.quantised_rows.bytes if self.quantised_rows else 0
        return (slots - self.quantised_slots) * row + quantised


def chosen_rows(buffer: KVBuffer, slots: int, heads: Tensor, columns: Tensor) -> KVBuffer:
    """A buffer that holds these of another's first `slots` rows, [n, m], of copies of these heads [n]."""
    chosen = KVBuffer(buffer.capacity)
    with torch.inference_mode(False):
        own = buffer.read(slots)
        chosen.rows = own[heads.to(own.device)[:, None], columns.to(own.device)]
    return chosen


def write_both(buffers: tuple[KVBuffer, KVBuffer], at: int, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Write key and value states [kv_heads, n, head_dim] of one layer from slot `at` on; returns all slots up to them.
    """
    return buffers[0].write(at, rows[0]), buffers[1].write(at, rows[1])
