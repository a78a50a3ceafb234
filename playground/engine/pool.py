"""Memory for the keys, or the values, of one layer: rows of the oldest tokens perhaps packed, all others as they were written."""
from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

GROWTH = 64  # slots a pool gets at a time, at least


class Packed(Protocol):
    """Rows of the oldest tokens in a coarser form, as a cache policy made them."""

    count: int  # slots
    bytes: int

    def unpack(self) -> Tensor:
        """The rows, [kv_heads, count, d], as near to what was written as the form allows."""


Encode = Callable[[Tensor, "Packed | None"], Packed]


class Pool:
    """Rows [kv_heads, slots, d]. Allocated when the first row arrives, grown by half, shrunk once twice too large."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None  # as written, [kv_heads, capacity, d]
        self.packed: Packed | None = None  # what comes before them

    @property
    def coarse(self) -> int:
        """Slots that are packed."""
        return self.packed.count if self.packed else 0

    def write(self, at: int, rows: Tensor) -> Tensor:
        """Put rows [kv_heads, n, d] at slot `at`; returns everything up to and with them."""
        start, count = at - self.coarse, rows.shape[1]
        if self.rows is None or start + count > self.rows.shape[1]:
            self._grow(start + count, rows)
        self.rows.narrow(1, start, count).copy_(rows)
        return self._all(start + count)

    def read(self, slots: int) -> Tensor:
        """The first `slots` rows, [kv_heads, slots, d]; a view where nothing is packed."""
        return self._all(slots - self.coarse)

    def _all(self, exact: int) -> Tensor:
        held = self.rows.narrow(1, 0, exact)
        return torch.cat([self.packed.unpack(), held], 1) if self.packed else held

    def _grow(self, wanted: int, like: Tensor) -> None:
        capacity = 0 if self.rows is None else self.rows.shape[1]
        grown = -(-max(wanted, capacity + capacity // 2) // GROWTH) * GROWTH
        with torch.inference_mode(False):  # an ordinary tensor, so that it can be moved about outside a forward
            new = torch.empty(like.shape[0], grown, like.shape[2], dtype=like.dtype, device=like.device)
        if capacity:
            new[:, :capacity] = self.rows
        self.rows = new

    def move(self, into: Tensor, used: int) -> None:
        """Go on in other memory, [kv_heads, capacity, d], with the first `used` slots; none of them is packed."""
        if used:
            into[:, :used] = self.rows[:, :used]
        self.rows = into

    def reorder(self, start: int, chosen: Tensor) -> None:
        """Slots start + chosen [n], in this order, become the slots from `start` on."""
        if self.rows is not None:
            start -= self.coarse
            self.rows[:, start:start + len(chosen)] = self.rows[:, start + chosen]

    def compact(self, order: Tensor, trunk: int, scratch: int) -> None:
        """Of the first `trunk` slots only order [1 or kv_heads, n] stay; the scratch moves up right behind them.

        Packed rows have no order of their own, so where one of them goes the others become as they can be read, until packed again.
        """
        if self.rows is None:
            return
        if self.packed and not self._leaves_packed(order):
            self._unpack(trunk + scratch)
        order, trunk = order[:, self.coarse:] - self.coarse, trunk - self.coarse
        count = order.shape[1]
        moved, tail = self._picked(order), self.rows[:, trunk:trunk + scratch].clone()
        self.rows[:, :count] = moved
        self.rows[:, count:count + scratch] = tail
        self._shrink(count + scratch)

    def _picked(self, order: Tensor) -> Tensor:
        """Rows held as written, by slot, order [1 or kv_heads, n], [kv_heads, n, d]. They are copied whole: a gather would take them number by number."""
        heads, capacity, d = self.rows.shape
        places = order + capacity * torch.arange(heads, device=order.device)[:, None]
        return self.rows.reshape(-1, d).index_select(0, places.flatten()).view(heads, -1, d)

    def _leaves_packed(self, order: Tensor) -> bool:
        first = torch.arange(self.coarse, device=order.device)
        return order.shape[1] >= self.coarse and bool((order[:, :self.coarse] == first).all())

    def _unpack(self, used: int) -> None:
        held, self.packed = self._all(used - self.coarse), None
        self._grow(used, held)
        self.rows[:, :used] = held

    def merge(self, into: Tensor, share: Tensor) -> None:
        """Each of the first rows is added, times its share [kv_heads, n], to the row of the slot `into` [kv_heads, n], which may be its own.

        A row to which no other one is added stays as it is, bit for bit. None of them is packed.
        """
        held, places = self.rows[:, :into.shape[1]], torch.arange(into.numel(), device=into.device).view_as(into)
        into = into + places[:, :1]  # slots of all heads in one row
        receives = torch.zeros(into.numel(), dtype=torch.bool, device=into.device).index_fill_(0, into[into != places], True)
        meets = receives[into]
        number = receives.cumsum(0) - 1  # of each slot among those that receive
        rows = held[meets].to(torch.promote_types(held.dtype, torch.float32))
        added = rows.new_zeros(int(receives.sum()), rows.shape[1]).index_add_(0, number[into[meets]], rows * share[meets][:, None].to(rows.dtype))
        held[receives.view_as(into)] = added.to(held.dtype)

    def pack(self, count: int, used: int, encode: Encode) -> None:
        """The oldest `count` rows that are held as written go over into the coarser form; `used` slots are held in all."""
        exact = used - self.coarse
        self.packed = encode(self.rows[:, :count], self.packed)
        self.rows[:, :exact - count] = self.rows[:, count:exact].clone()
        self._shrink(exact - count)

    def _shrink(self, used: int) -> None:
        if self.rows.shape[1] > 2 * used + GROWTH:
            self.rows = self.rows[:, :used + GROWTH].clone()

    def bytes(self, slots: int) -> int:
        """Memory that `slots` slots take, packed ones in their own form."""
        if self.rows is None:
            return 0
        row = len(self.rows) * self.rows.shape[2] * self.rows.element_size()
        return (slots - self.coarse) * row + (self.packed.bytes if self.packed else 0)
