"""The KV store of one model for one lane: a trunk of kept tokens, and a scratch tree of tokens that may still be refused.

Every slot belongs to one token of one layer. The trunk comes first and may have holes, other ones in every layer and head,
because a policy may evict; the scratch follows and is whole. New rows see the live trunk and their own ancestors. Positions
are always the true ones: evicting renumbers nothing, siblings share a position.

    store.extend(parents)      rows to be fed: nodes of the scratch, by the index of their parent (-1: end of the trunk)
    store.keep(node)           the path down to a node joins the trunk, what hangs below it stays, everything else is forgotten
    store.forget()             the scratch is dropped
    store.roll_back(count)     the last tokens of the trunk are forgotten
    store.evict(live)          slots of the trunk are freed, chosen by layer and head
"""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

GROWTH = 64  # slots a layer gets at a time, at least
DEAD = -1
CAUSAL = "causal"  # stands for a mask that need not be written out: each row sees all before it


@dataclass
class Slots:
    """True position of every trunk slot, [1 or kv_heads, n]; DEAD where a head holds fewer than the others."""

    positions: Tensor
    whole: bool = True  # no place is DEAD

    @property
    def count(self) -> int:
        return self.positions.shape[1]


@dataclass
class Layer:
    """Keys and values of one layer, [kv_heads, capacity, d]; allocated when the first row arrives."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def slot_bytes(self) -> int:
        """Memory of one slot in all heads."""
        return 0 if self.keys is None else sum(len(pool) * pool.shape[2] * pool.element_size() for pool in (self.keys, self.values))


@dataclass
class Store:
    depth: int  # decoder layers
    device: torch.device | str = "cpu"
    length: int = 0  # tokens of the trunk, evicted ones included: the true position of the next token
    parents: list[int] = field(default_factory=list)  # of the scratch nodes, within the scratch
    depths: list[int] = field(default_factory=list)  # of the scratch nodes; 0 continues the trunk
    window: Window | None = None  # what a cache policy lets decode rows see

    def __post_init__(self) -> None:
        self.layers = [Layer() for _ in range(self.depth)]
        self.slots = [Slots(torch.empty(1, 0, dtype=torch.long, device=self.device))]  # one for all layers, or one each

    # --- what a forward asks for ---

    def extend(self, parents: list[int]) -> Segment:
        """New scratch nodes and the segment that feeds them. A parent is a scratch node, perhaps a new one, or -1."""
        first = len(self.parents)
        for node, parent in enumerate(parents, first):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} cannot continue node {parent}")
            self.parents.append(parent)
            self.depths.append(0 if parent == -1 else self.depths[parent] + 1)
        return Segment(self, first, len(parents))

    def slots_of(self, layer: int) -> Slots:
        return self.slots[layer if len(self.slots) > 1 else 0]

    def write(self, layer: int, at: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows [kv_heads, n, d] at scratch place `at`; returns everything the layer holds up to them."""
        start, rows = self.slots_of(layer).count + at, keys.shape[1]
        held = self.layers[layer]
        self._reserve(held, start + rows, keys, values)
        held.keys.narrow(1, start, rows).copy_(keys)
        held.values.narrow(1, start, rows).copy_(values)
        return held.keys.narrow(1, 0, start + rows), held.values.narrow(1, 0, start + rows)

    def _reserve(self, held: Layer, wanted: int, keys: Tensor, values: Tensor) -> None:
        capacity = 0 if held.keys is None else held.keys.shape[1]
        if wanted <= capacity:
            return
        grown = -(-max(wanted, capacity + capacity // 2) // GROWTH) * GROWTH
        for name, like in (("keys", keys), ("values", values)):
            with torch.inference_mode(False):  # an ordinary tensor, so that it can be moved about outside a forward
                new = torch.empty(like.shape[0], grown, like.shape[2], dtype=like.dtype, device=like.device)
            if capacity:
                new[:, :capacity] = getattr(held, name)
            setattr(held, name, new)

    # --- what moves nodes and slots ---

    def keep(self, node: int) -> list[int]:
        """Move the path down to scratch node `node` into the trunk. Returns the nodes below it that stay, renumbered from 0; -1 keeps none."""
        path = self.path(node)
        stay = self._below(node) if node != -1 else []
        self._gather([*path, *stay])
        self._lengthen(len(path))
        renumbered = {old: new for new, old in enumerate(stay)}
        self.parents = [renumbered.get(self.parents[old], -1) for old in stay]
        self.depths = [self.depths[old] - len(path) for old in stay]
        return stay

    def path(self, node: int) -> list[int]:
        path = []
        while node != -1:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def _below(self, node: int) -> list[int]:
        below: dict[int, None] = {}
        for child, parent in enumerate(self.parents):
            if parent == node or parent in below:
                below[child] = None
        return list(below)

    def forget(self) -> None:
        """Drop the whole scratch."""
        self.parents, self.depths = [], []

    def _gather(self, order: list[int]) -> None:
        """Scratch slots in a new order; free of cost where the first ones stay in place."""
        if order == list(range(len(order))):
            return
        chosen = torch.tensor(order, device=self.device)
        for index, held in enumerate(self.layers):
            if held.keys is not None:
                start = self.slots_of(index).count
                for pool in (held.keys, held.values):
                    pool[:, start:start + len(order)] = pool[:, start + chosen]

    def _lengthen(self, count: int) -> None:
        added = torch.arange(self.length, self.length + count, device=self.device)
        for slots in self.slots:
            slots.positions = torch.cat([slots.positions, added.expand(slots.positions.shape[0], count)], 1)
        self.length += count

    def roll_back(self, count: int) -> None:
        """Forget the scratch and the last `count` tokens of the trunk."""
        kept = self.length - count
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot take back {count} of {self.length} tokens")
        self.forget()
        self.evict([slots.positions < kept for slots in self.slots])
        self.length = kept

    def evict(self, live: list[Tensor]) -> int:
        """Free trunk slots. `live` is one mask [1 or kv_heads, slots] for all layers, or one for each; returns slots freed over layers and heads."""
        before = self.live_slots()
        if len(live) > len(self.slots):
            self.slots = [Slots(self.slots[0].positions.clone()) for _ in range(self.depth)]
        for index, slots in enumerate(self.slots):
            layers = range(self.depth) if len(self.slots) == 1 else (index,)
            self._compact(slots, live[index if len(live) > 1 else 0], [self.layers[i] for i in layers])
        return before - self.live_slots()

    def _compact(self, slots: Slots, live: Tensor, layers: list[Layer]) -> None:
        """Close the holes: live slots keep their order, every head as many places as the fullest one needs."""
        live = live & (slots.positions != DEAD)
        if bool(live.all()):
            return
        order = torch.argsort(~live, dim=1, stable=True)
        count = int(live.sum(1).max())
        scratch = len(self.parents)
        for held in layers:
            if held.keys is not None:
                _move(held.keys, order[:, :count], slots.count, scratch)
                _move(held.values, order[:, :count], slots.count, scratch)
                _release(held, count + scratch)
        lasting = live.gather(1, order[:, :count])
        slots.positions = slots.positions.expand_as(order).gather(1, order[:, :count]).masked_fill(~lasting, DEAD)
        slots.whole = bool(lasting.all())

    # --- what a screen or a policy wants to know ---

    @property
    def heads(self) -> int:
        keys = self.layers[0].keys
        return 0 if keys is None else keys.shape[0]

    def live_slots(self) -> int:
        """Live trunk slots over all layers and heads."""
        each = self.depth if len(self.slots) == 1 else 1
        return sum(each * int((s.positions != DEAD).sum()) * (self.heads if s.positions.shape[0] == 1 else 1) for s in self.slots)

    def bytes(self) -> int:
        """Memory of the slots held, trunk and scratch."""
        alike = self.depth if len(self.slots) == 1 else 1  # layers that hold as many slots as the first of them
        return sum(alike * (slots.count + len(self.parents)) * held.slot_bytes() for slots, held in zip(self.slots, self.layers))

    def runs(self) -> list[list[list[tuple[int, int]]]]:
        """Live true positions as half-open stretches, by layer and head; one entry where all layers or heads agree."""
        return [[[(0, slots.count)]] if slots.whole and slots.count == self.length else [_stretches(row) for row in slots.positions.tolist()] for slots in self.slots]


def _move(pool: Tensor, order: Tensor, count: int, scratch: int) -> None:
    """Trunk slots [heads, count] of a pool into a new order, the scratch right behind them; shrinks nothing."""
    heads, new = order.shape
    index = order[:, :, None].expand(pool.shape[0] if heads == 1 else heads, new, pool.shape[2])
    moved = pool[:, :count].gather(1, index)
    tail = pool[:, count:count + scratch].clone()
    pool[:, :new] = moved
    pool[:, new:new + scratch] = tail


def _release(held: Layer, used: int) -> None:
    """Give memory back once a pool is more than twice as large as what it holds."""
    if held.keys.shape[1] > 2 * used + GROWTH:
        held.keys, held.values = (pool[:, :used + GROWTH].clone() for pool in (held.keys, held.values))


def _stretches(positions: list[int]) -> list[tuple[int, int]]:
    runs: list[list[int]] = []
    for position in sorted(p for p in positions if p != DEAD):
        if runs and runs[-1][1] == position:
            runs[-1][1] = position + 1
        else:
            runs.append([position, position + 1])
    return [(a, b) for a, b in runs]


@dataclass
class Window:
    """A cache policy's view: visible(query [n, 1], key [m]) -> [n, m], held against rows from position `start` on."""

    visible: object
    start: int


@dataclass
class Segment:
    """Rows of one store in one forward: scratch nodes first .. first + rows."""

    store: Store
    first: int
    rows: int
    _masks: dict = field(default_factory=dict)

    def positions(self) -> list[int]:
        """True position of each row."""
        return [self.store.length + depth for depth in self.store.depths[self.first:self.first + self.rows]]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.store.write(layer, self.first, keys, values)

    def mask(self, layer: int, sliding_window: int | None) -> Tensor | str | None:
        """What the rows may see in a layer: [rows, slots], [kv_heads, rows, slots], CAUSAL, or None for everything."""
        key = (sliding_window, layer if len(self.store.slots) > 1 else 0)
        if key not in self._masks:
            self._masks[key] = self._build(self.store.slots_of(layer), sliding_window)
        return self._masks[key]

    def _build(self, slots: Slots, sliding_window: int | None) -> Tensor | str | None:
        if self._narrow(sliding_window) or not slots.whole:
            return self._explicit(slots, sliding_window)
        before = slots.count + self.first
        if not self._is_chain():
            seen = torch.ones(self.rows, slots.count, dtype=torch.bool, device=self.store.device)
            return torch.cat([seen, self._ancestors()], 1)
        if self.rows == 1:
            return None
        return CAUSAL if not before else torch.ones(self.rows, before + self.rows, dtype=torch.bool, device=self.store.device).tril(before)

    def _narrow(self, sliding_window: int | None) -> bool:
        """Whether some row may not see all that came before it."""
        return self.store.window is not None or bool(sliding_window and self.store.length + len(self.store.parents) > sliding_window)

    def _is_chain(self) -> bool:
        return self.store.parents == list(range(-1, len(self.store.parents) - 1))

    def _explicit(self, slots: Slots, sliding_window: int | None) -> Tensor:
        device = self.store.device
        query = torch.tensor(self.positions(), device=device)[:, None]
        scratch = torch.tensor([self.store.length + d for d in self.store.depths], device=device)
        trunk = slots.positions[:, None, :]  # [1 or heads, 1, n]
        seen = (trunk != DEAD) & self._allowed(query, trunk, sliding_window)
        own = self._ancestors() & self._allowed(query, scratch, sliding_window)
        mask = torch.cat([seen.expand(-1, self.rows, -1), own.expand(len(seen), -1, -1)], 2)
        return mask[0] if len(mask) == 1 else mask

    def _allowed(self, query: Tensor, key: Tensor, sliding_window: int | None) -> Tensor:
        allowed = query >= key
        if sliding_window:
            allowed = allowed & (query - key < sliding_window)
        if window := self.store.window:
            allowed = allowed & ((query < window.start) | window.visible(query, key))
        return allowed

    def _ancestors(self) -> Tensor:
        """Which scratch nodes each row descends from, itself included, [rows, scratch]."""
        parents = self.store.parents
        seen = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent != -1:
                seen[node] |= seen[parent]
        return seen[self.first:].to(self.store.device)
