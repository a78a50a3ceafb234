"""What the rows of one forward may see: a segment of a store, and its masks."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy
import torch
from torch import Tensor

from playground.engine.kv_buffer import KVBuffer, write_both

EMPTY = -1  # position of a slot that holds no token
CAUSAL = "causal"  # stands for a mask that need not be written out: each row sees all before it
Prefix = tuple[int, int]
"""Where keys begin that several stores hold together, and how many of their slots a store begins with."""


@dataclass
class Slots:
    """True position of every trunk slot, [1 or kv_heads, n]; EMPTY where a head holds fewer tokens than the others."""

    positions: Tensor
    whole: bool = True  # no place is EMPTY

    @property
    def count(self) -> int:
        return self.positions.shape[1]

    @property
    def held(self) -> int:
        """Slots that hold a token, over the heads that differ."""
        return self.positions.numel() if self.whole else int((self.positions != EMPTY).sum())


def slots_of(slots: list[Slots], layer: int) -> Slots:
    """The slots of one layer, given one entry for all layers or one for each."""
    return slots[layer] if len(slots) > 1 else slots[0]


class SlotStore(Protocol):
    """What a segment reads of the KV cache it belongs to (`engine.kv_cache.Store`)."""

    device: torch.device | str
    length: int
    common: int
    parents: list[int]
    depths: list[int]
    lineage: list[int]
    slots: list[Slots]
    keys: list[KVBuffer]
    values: list[KVBuffer]
    window: Window | None
    focus: Focus | None
    renumbering: Renumbering | None
    hear: Callable | None
    ask: Callable | None

    def slots_of(self, layer: int) -> Slots:
        """Positions of the slots of one layer."""

    def watch(self, segment: Segment, layer: int, weights: Tensor) -> None:
        """Note the attention weights [kv_heads, watched rows, slots] of one layer."""


@dataclass
class Window:
    """A cache policy's view: visible(query [n, 1], key [m]) -> [n, m], held against rows from position `start` on."""

    visible: object
    start: int


@dataclass
class Focus:
    """A cache policy's choice by attention: choose(layer, weights [kv_heads, n, m], positions of the rows [n]) -> what
    they see, [kv_heads, n, m].

    It is asked for the rows at positions that `among` names.
    """

    choose: Callable[[int, Tensor, Tensor], Tensor]
    among: Callable[[int], bool]


@dataclass
class Renumbering:
    """Rows from position `start` on stand at their place in the cache: to what lies before a gap they are nearer than
    in the text.

    far(key [..., m]) says what lies before it, skipped(query [n]) by how many positions it is wide, turn(query [heads,
    n, d], positions [n]) turns a rotated query back.
    """

    skipped: Callable[[Tensor], Tensor]
    far: Callable[[Tensor], Tensor]
    turn: Callable[[Tensor, Tensor], Tensor]
    start: int


@dataclass
class Segment:
    """Rows of one store in one forward: scratch nodes first .. first + rows. `watched` are rows whose attention is
    wanted.
    """

    store: SlotStore
    first: int
    rows: int
    watched: list[int] = field(default_factory=list)
    _masks: dict = field(default_factory=dict)
    _biases: dict = field(default_factory=dict)

    def positions(self) -> list[int]:
        """True position of each row."""
        return [self.store.length + depth for depth in self.store.depths[self.first:self.end]]

    @property
    def end(self) -> int:
        return self.first + self.rows

    def is_plain(self, sliding_window: int | None) -> bool:
        """Whether each row sees all of the trunk and its own ancestors, in every layer, and all of it is held as it was
        written.
        """
        store = self.store
        same = (
            len(store.slots) == 1
            and store.slots[0].whole
            and not (self._narrow(sliding_window) or self.focused or self.renumbers or self.asks)
        )
        return same and not self.watched and not any(pool.packed for pool in (*store.keys, *store.values))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the rows' keys and values [kv_heads, rows, head_dim]; returns all that the layer holds up to them."""
        buffers = self.store.keys[layer], self.store.values[layer]
        return write_both(buffers, slots_of(self.store.slots, layer).count + self.first, (keys, values))

    def prefix(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the store holds together with others, [kv_heads, slots, d] each, where `shares` says so.
        """
        return self.store.keys[layer].prefix, self.store.values[layer].prefix

    def write_suffix(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `write`, but returns what follows the shared prefix."""
        start = slots_of(self.store.slots, layer).count + self.first
        return self.store.keys[layer].write_suffix(start, keys), self.store.values[layer].write_suffix(start, values)

    def shares(self, sliding_window: int | None) -> Prefix | None:
        """What tells the prefix its store holds together with others, where every row sees all of it and nobody asks
        for weights over prefix and suffix.
        """
        keys = self.store.keys[0].prefix
        if keys is None or self.watched or self.focused or self.renumbers or self.asks or self._narrow(sliding_window):
            return None
        return keys.data_ptr(), keys.shape[1]

    def watch(self, layer: int, weights: Tensor) -> None:
        """Tell what the watched rows attended to in a layer, [kv_heads, watched, slots]."""
        self.store.watch(self, layer, weights)

    def mask(self, layer: int, sliding_window: int | None) -> Tensor | str | None:
        """What the rows may see in a layer: [rows, slots], [kv_heads, rows, slots], CAUSAL, or None for everything."""
        key = (sliding_window, layer if len(self.store.slots) > 1 else 0)
        if key not in self._masks:
            self._masks[key] = self._build(self.store.slots_of(layer), sliding_window)
        return self._masks[key]

    def bias(self, layer: int, sliding_window: int | None, groups: int, dtype: torch.dtype) -> Tensor | str | None:
        """The mask as what is added to the scores of all heads of a group, as `as_bias` makes it.

        Layers with one mask share it: it is written out once a forward. CAUSAL and None stand as they are.
        """
        mask = self.mask(layer, sliding_window)
        if mask is None or isinstance(mask, str):
            return mask
        key = (id(mask), groups, dtype)
        if key not in self._biases:
            self._biases[key] = as_bias(mask, groups, dtype)
        return self._biases[key]

    def suffix_bias(self, layer: int, sliding_window: int | None, groups: int, dtype: torch.dtype) -> Tensor | None:
        """The same for what comes behind a prefix that all rows see."""
        bias = self.bias(layer, sliding_window, groups, dtype)
        return None if bias is None else bias[..., self.store.common:]

    def chosen(self, layer: int, weights: Tensor, mask: Tensor | None) -> Tensor:
        """What the rows see of the mask [1 or kv_heads, rows, slots], or of everything, once a policy chose by their
        weights over all of that.
        """
        (rows, positions), choose = self._choosing, self.store.focus.choose
        if len(rows) == self.rows:
            seen = choose(layer, weights, positions)
        else:
            seen = torch.ones_like(weights, dtype=torch.bool)
            seen[:, rows] = choose(layer, weights[:, rows], positions)
        return seen if mask is None else seen & mask

    @cached_property
    def _choosing(self) -> tuple[list[int], Tensor]:
        """The rows that a policy chooses for, and their positions."""
        found = [(row, position) for row, position in enumerate(self.positions()) if self.store.focus.among(position)]
        return [row for row, _ in found], torch.tensor([position for _, position in found], device=self.store.device)

    @cached_property
    def focused(self) -> bool:
        """Whether a policy chooses for some row by what it attends to."""
        focus = self.store.focus
        return focus is not None and any(map(focus.among, self.positions()))

    @cached_property
    def asks(self) -> bool:
        """Whether somebody wants to know what the rows look for."""
        return self.store.ask is not None

    @cached_property
    def renumbers(self) -> bool:
        """Whether rows stand at their place in the cache."""
        return self.store.renumbering is not None

    def renumbered(self, layer: int, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [heads, n, 2 d] whose products are those of rows and tokens that are numbered by their place
        in the cache.

        A row has two queries, one for what lies before the gap and one for the rest, and a key is empty where the other
        one counts.
        """
        numbers, at = self.store.renumbering, torch.tensor(self.positions(), device=self.store.device)
        skipped = numbers.skipped(at).masked_fill(at < numbers.start, 0)
        far = numbers.far(self._slot_positions(layer))[..., None]
        return torch.cat([query, numbers.turn(query, skipped)], -1), torch.cat([keys * ~far, keys * far], -1)

    def _slot_positions(self, layer: int) -> Tensor:
        """True positions of all slots up to these rows, trunk and scratch, [1 or kv_heads, slots]."""
        trunk = self.store.slots_of(layer).positions
        scratch = (
            torch.tensor(self.store.depths[: self.end], dtype=torch.long, device=self.store.device) + self.store.length
        )
        return torch.cat([trunk, scratch.expand(len(trunk), -1)], 1)

    def _build(self, slots: Slots, sliding_window: int | None) -> Tensor | str | None:
        if self._narrow(sliding_window) or not slots.whole:
            return self._explicit(slots, sliding_window)
        before = slots.count + self.first
        if not self._is_chain():
            seen = torch.ones(self.rows, slots.count, dtype=torch.bool, device=self.store.device)
            return torch.cat([seen, self._own], 1)
        if self.rows == 1:
            return None
        return (
            CAUSAL
            if not before
            else torch.ones(self.rows, before + self.rows, dtype=torch.bool, device=self.store.device).tril(before)
        )

    def _narrow(self, sliding_window: int | None) -> bool:
        """Whether some row may not see all that came before it."""
        return self.store.window is not None or bool(sliding_window and self.store.length + self.end > sliding_window)

    def _is_chain(self) -> bool:
        return self.store.parents[:self.end] == list(range(-1, self.end - 1))

    def _explicit(self, slots: Slots, sliding_window: int | None) -> Tensor:
        trunk, own = slots.positions[:, None, :], self._own  # [1 or heads, 1, n]
        seen = trunk != EMPTY
        if self._narrow(sliding_window):
            device = self.store.device
            query = torch.tensor(self.positions(), device=device)[:, None]
            scratch = torch.tensor([self.store.length + d for d in self.store.depths[:self.end]], device=device)
            seen, own = (
                seen & self._allowed(query, trunk, sliding_window),
                own & self._allowed(query, scratch, sliding_window),
            )
        mask = torch.cat([seen.expand(-1, self.rows, -1), own.expand(len(seen), -1, -1)], 2)
        return mask[0] if len(mask) == 1 else mask

    def _allowed(self, query: Tensor, key: Tensor, sliding_window: int | None) -> Tensor:
        allowed = query >= key
        if sliding_window:
            allowed = allowed & (query - key < sliding_window)
        if window := self.store.window:
            allowed = allowed & ((query < window.start) | window.visible(query, key))
        return allowed

    @cached_property
    def _own(self) -> Tensor:
        """Which scratch nodes each row sees, [rows, scratch], in every layer."""
        return torch.from_numpy(self.ancestors()).bool().to(self.store.device)

    def ancestors(self) -> numpy.ndarray:
        """Which scratch nodes each row descends from, itself included, [rows, scratch] of 0 and 1."""
        lines = self.store.lineage[self.first:self.end]
        size = -(-self.end // 8)
        packed = numpy.frombuffer(b"".join(line.to_bytes(size, "little") for line in lines), numpy.uint8)
        return numpy.unpackbits(packed.reshape(self.rows, size), axis=1, count=self.end, bitorder="little")


@dataclass
class LateSegment(Segment):
    """Tokens of the trunk that the first layers have read and the others read now, which hold of the trunk these and no
    others.

    They go to the slots from `first` on, each stands at its true place of the text and sees those before it that got as
    far.
    """

    places: list[int] = field(default_factory=list)  # true positions, ascending

    def positions(self) -> list[int]:
        return self.places

    def is_plain(self, sliding_window: int | None) -> bool:
        return False

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.store.keys[layer].write(self.first, keys), self.store.values[layer].write(self.first, values)

    def watch(self, layer: int, weights: Tensor) -> None:
        """They are kept already, so what they attended to is told of at once."""
        if self.store.hear:
            watched = torch.tensor([self.places[row] for row in self.watched], device=self.store.device)
            self.store.hear(layer, weights, watched, self._slot_positions(layer))

    def _slot_positions(self, layer: int) -> Tensor:
        return self.store.slots_of(layer).positions[:, :self.end]

    def _build(self, slots: Slots, sliding_window: int | None) -> Tensor | str | None:
        if not self.first and not self._narrow(sliding_window):
            return CAUSAL
        query = torch.tensor(self.places, device=self.store.device)[:, None]
        return self._allowed(query, slots.positions[0, :self.end], sliding_window)


def as_bias(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A mask [rows, slots] or [kv_heads, rows, slots] as what is added to the scores of all heads of a group: the first
    with groups * rows for its rows, the second as [1, kv_heads, groups * rows, slots]. A single row is not repeated:
    all heads read the one.
    """
    written = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    if mask.shape[-2] > 1:
        written = written.repeat(*[1] * (mask.dim() - 2), groups, 1)
    # torch's fast attention takes two or four dimensions, and is slow with three
    return written[None] if mask.dim() == 3 else written
