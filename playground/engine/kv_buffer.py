"""Memory for the keys, or the values, of one layer: rows of the oldest tokens perhaps packed, or shared with other
pools; all others as they were written.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

GROWTH = 64  # slots a pool gets at a time, at least


class Capacity(NamedTuple):
    """Slots that will be wanted of a pool, the scratch aside."""

    soon: int = 0  # as far as is known when the first row arrives
    most: float = math.inf


UNKNOWN = Capacity()


class Packed(Protocol):
    """Rows of the oldest tokens in a coarser form, as a cache policy made them."""

    count: int  # slots
    bytes: int

    def unpack(self, room: int = 0) -> Tensor:
        """The rows, [kv_heads, count + room, d], as near to what was written as the form allows, in memory of their
        own; whatever stands in the last `room` of them will be written over."""


Encode = Callable[[Tensor, "Packed | None"], Packed]


@dataclass(frozen=True)
class SlotOrder:
    """Slots that stay, in their order, as the keys and the values of all layers that agree are told."""

    slots: Tensor  # [1 or kv_heads, n]
    _rows: dict = field(default_factory=dict)

    def rows(self, heads: int, capacity: int, ahead: int, behind: range = range(0), room: int = 0) -> Tensor:
        """The slots behind the first `ahead` ones as rows of a pool's memory, all heads of it in one row; pools of one
        size share them.

        In each head the slots `behind` follow, and `room` more of which nothing is wanted.
        """
        key = heads, capacity, ahead, behind, room
        if key not in self._rows:
            starts, tail = _ends(*key, self.slots.device)
            self._rows[key] = torch.cat([self.slots[:, ahead:] + starts, tail], 1).flatten()
        return self._rows[key]

    def leaves(self, count: int) -> bool:
        """Whether the first `count` slots stay where they are."""
        first = torch.arange(count, device=self.slots.device)
        return self.slots.shape[1] >= count and bool((self.slots[:, :count] == first).all())


@lru_cache(maxsize=64)
def _ends(
    heads: int, capacity: int, ahead: int, behind: range, room: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where each head's own rows begin in a pool's memory, [heads, 1], and which rows follow those that stay, [heads,
    m].

    A cache that is full loses a token for each it gets, so all its layers ask the same at every step.
    """
    with torch.inference_mode(False):
        starts = capacity * torch.arange(heads, device=device)[:, None] - ahead
        return starts, torch.tensor([*behind, *[ahead] * room], dtype=torch.long, device=device) + starts


class MergeMap(NamedTuple):
    """Slots of one layer that go into others, of which several may go into one."""

    sources: tuple[Tensor, Tensor]  # head and slot of each that goes, [m], head by head
    into: Tensor  # the number of its target, [m]
    targets: tuple[Tensor, Tensor]  # head and slot of each that takes some in, [k]

    @classmethod
    def of(cls, sources: tuple[Tensor, Tensor], slots: Tensor, count: int) -> MergeMap:
        """Each source goes into one of `slots` [m] of its own head, of which there are `count`."""
        met, into = (sources[0] * count + slots).unique(return_inverse=True)
        return cls(sources, into, (met // count, met % count))


class MergedTokens(NamedTuple):
    """Tokens that went into others, head by head."""

    heads: Tensor  # [m]
    sources: Tensor  # positions, [m]
    targets: Tensor

    @classmethod
    def of(cls, meeting: MergeMap, positions: Tensor) -> MergedTokens:
        """What goes into other slots, by the positions of all, [kv_heads, slots]."""
        return cls(meeting.sources[0], positions[meeting.sources], positions[meeting.targets][meeting.into])

    def by_head(self, heads: int) -> list[list[tuple[int, int]]]:
        """For each of so many heads the positions of what went, each with the one it went into."""
        counts = self.heads.bincount(minlength=heads).tolist()
        each = zip(self.sources.split(counts), self.targets.split(counts))
        return [list(zip(sources.tolist(), targets.tolist())) for sources, targets in each]


def in_front(mask: Tensor, counts: list[int] | None = None) -> Tensor:
    """The slots of each row that stand in the mask [rows, slots], in their order, [rows, most]; a row that has fewer
    goes on with those that do not.

    `counts` says how many a row has, where that is known.
    """
    counts = mask.sum(1).tolist() if counts is None else counts
    if min(counts) == max(counts):
        return mask.nonzero()[:, 1].view(len(mask), counts[0])
    return (~mask).byte().argsort(dim=1, stable=True)[:, :max(counts)]


class KVBuffer:
    """Rows [kv_heads, slots, d]. Allocated when the first row arrives, grown by half as long as more may be wanted,
    shrunk once twice too large.
    """

    def __init__(self, room: Capacity = UNKNOWN) -> None:
        self.room = room
        self.rows: Tensor | None = None  # as written, [kv_heads, capacity, d]
        self.packed: Packed | None = None  # what comes before them, or
        # what comes before them and is held once for several pools, [kv_heads, slots, d]: nobody writes to it
        self.prefix: Tensor | None = None

    @property
    def coarse(self) -> int:
        """Slots that are packed."""
        return self.packed.count if self.packed else 0

    @property
    def common(self) -> int:
        """Slots that are held once for several pools."""
        return 0 if self.prefix is None else self.prefix.shape[1]

    @property
    def ahead(self) -> int:
        """Slots that come before its own rows."""
        return self.coarse + self.common

    @property
    def heads(self) -> int:
        """Of keys and values; 0 before the first row."""
        rows = self.rows if self.prefix is None else self.prefix
        return 0 if rows is None else rows.shape[0]

    def begin_with(self, rows: Tensor, once: bool) -> None:
        """Have these rows [kv_heads, n, d] before all others: `once` for every pool that is given them, or as a copy of
        its own.
        """
        if once:
            self.prefix = rows
        else:
            self.write(0, rows)

    def write(self, at: int, rows: Tensor) -> Tensor:
        """Put rows [kv_heads, n, d] at slot `at`; returns everything up to and with them."""
        return self._behind_all(self.write_suffix(at, rows))

    def write_suffix(self, at: int, rows: Tensor) -> Tensor:
        """The same, but returns only what is held as written, and by this pool alone."""
        start, count = at - self.ahead, rows.shape[1]
        if self.rows is None or start + count > self.rows.shape[1]:
            self._grow(start + count, rows)
        self.rows.narrow(1, start, count).copy_(rows)
        return self.rows.narrow(1, 0, start + count)

    def read(self, slots: int) -> Tensor:
        """The first `slots` rows, [kv_heads, slots, d]; a view where nothing comes before its own, or nothing behind
        what others hold too.
        """
        exact = slots - self.ahead
        return self._behind_all(self.rows.narrow(1, 0, exact)) if exact or self.prefix is None else self.prefix

    def _behind_all(self, held: Tensor) -> Tensor:
        if self.prefix is not None:
            return torch.cat([self.prefix, held], 1)
        if not self.packed:
            return held
        rows = self.packed.unpack(held.shape[1])
        rows[:, self.coarse:] = held
        return rows

    def _grow(self, wanted: int, like: Tensor) -> None:
        capacity = 0 if self.rows is None else self.rows.shape[1]
        ahead = capacity + capacity // 2 if capacity else self.room.soon + GROWTH - self.ahead
        most = self.room.most - self.ahead
        # a scratch may outgrow the text
        grown = -(-max(wanted, min(ahead, most) if wanted <= most else ahead) // GROWTH) * GROWTH
        with torch.inference_mode(False):  # an ordinary tensor, so that it can be moved about outside a forward
            new = torch.empty(like.shape[0], grown, like.shape[2], dtype=like.dtype, device=like.device)
        if capacity:
            new[:, :capacity] = self.rows
        self.rows = new

    def move(self, into: Tensor, used: int) -> None:
        """Go on in other memory, [kv_heads, capacity, d], with the first `used` slots; none of them is packed."""
        if used:
            into[:, :used] = self.read(used)
        self.rows, self.prefix = into, None

    def reorder(self, start: int, chosen: Tensor) -> None:
        """Slots start + chosen [n], in this order, become the slots from `start` on."""
        if self.rows is not None:
            rows = self.rows[:, start - self.ahead:]
            rows[:, :len(chosen)] = rows.index_select(1, chosen)

    def compact(self, order: SlotOrder, trunk: int, scratch: int) -> None:
        """Of the first `trunk` slots only those of the order stay; the scratch moves up right behind them.

        Packed rows have no order of their own, so where one of them goes the others become as they can be read, until
        packed again. Of a prefix that is held with others any beginning may stay so; where another part of it goes,
        what is left becomes this pool's own.
        """
        if self.rows is None and self.prefix is None:
            return
        if len(order.slots) > 1 and not self.ahead:
            self._go_on_elsewhere(order, range(trunk, trunk + scratch))
            return
        tail = self.rows[:, trunk - self.ahead:trunk - self.ahead + scratch].clone() if scratch else None
        if self.ahead and not order.leaves(self.ahead):
            self._leave(order, trunk + scratch)
        if self.rows is None:
            return
        moved = self._picked(order)
        count = moved.shape[1]
        self.rows[:, :count] = moved
        if scratch:
            self.rows[:, count:count + scratch] = tail
        self._shrink(count + scratch)

    def _go_on_elsewhere(self, order: SlotOrder, behind: range) -> None:
        """The same where every head has an order of its own: in other memory, so that no row is copied twice, with a
        place for one more at least.
        """
        used = order.slots.shape[1] + len(behind)
        with torch.inference_mode(False):
            self.rows = self._picked(order, behind, GROWTH - used % GROWTH)

    def _picked(self, order: SlotOrder, behind: range = range(0), room: int = 0) -> Tensor:
        """Rows held as written, [kv_heads, n, d]: by their order, then the slots `behind`, then some that say nothing.
        They are copied whole: a gather would take them number by number."""
        heads, capacity, d = self.rows.shape
        return (
            self.rows.reshape(-1, d)
            .index_select(0, order.rows(heads, capacity, self.ahead, behind, room))
            .view(heads, -1, d)
        )

    def _leave(self, order: SlotOrder, used: int) -> None:
        """Of what comes before its own rows, some goes."""
        count = order.slots.shape[1]
        if self.prefix is not None and count < self.common and order.leaves(count):
            self.prefix = self.prefix[:, :count] if count else None
        else:
            self._own(used)

    def _own(self, used: int) -> None:
        """Hold all `used` slots as rows of its own."""
        held = self.read(used)
        self.packed = self.prefix = None
        self._grow(used, held)
        self.rows[:, :used] = held

    def merge(self, meeting: MergeMap, added: Tensor, kept: Tensor) -> None:
        """Rows that take others in become `kept` [k] times themselves and `added` [m] times those; every other one
        stays as it is, bit for bit.

        None of them is packed.
        """
        wide = torch.promote_types(self.rows.dtype, torch.float32)
        total = self.rows[meeting.targets].to(wide) * kept[:, None].to(wide)
        total.index_add_(0, meeting.into, self.rows[meeting.sources].to(wide) * added[:, None].to(wide))
        self.rows[meeting.targets] = total.to(self.rows.dtype)

    def pack(self, count: int, used: int, encode: Encode) -> None:
        """The oldest `count` rows that are held as written go over into the coarser form; `used` slots are held in all.
        """
        exact = used - self.coarse
        self.packed = encode(self.rows[:, :count], self.packed)
        self.rows[:, :exact - count] = self.rows[:, count:exact].clone()
        self._shrink(exact - count)

    def _shrink(self, used: int) -> None:
        if self.rows.shape[1] > 2 * used + GROWTH:
            self.rows = self.rows[:, :used + GROWTH].clone()

    def bytes(self, slots: int) -> int:
        """Memory that `slots` slots take, packed ones in their own form."""
        rows = self.rows if self.prefix is None else self.prefix
        if rows is None:
            return 0
        row = len(rows) * rows.shape[2] * rows.element_size()
        return (slots - self.coarse) * row + (self.packed.bytes if self.packed else 0)


def write_both(buffers: tuple[KVBuffer, KVBuffer], at: int, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Write the keys and the values of one layer at slot `at`, [kv_heads, n, head_dim] each; returns all up to and with
    them.
    """
    return buffers[0].write(at, rows[0]), buffers[1].write(at, rows[1])
