"""The KV store of one model for one lane: a trunk of kept tokens, and a scratch tree of tokens that may still be
refused.

Every slot belongs to one token of one layer. The trunk comes first and may have holes, other ones in every layer and
head, because a policy may evict; the scratch follows and is whole. New rows see the live trunk and their own ancestors.
Positions are always the true ones: evicting renumbers nothing, siblings share a position.

    store.extend(parents)      rows to be fed: nodes of the scratch, by the index of their parent (-1: end of the trunk)
    store.keep(node)           the path down to a node joins the trunk, what hangs below it stays, everything else is
    forgotten
    store.prune(nodes)         of the scratch only these nodes stay
    store.roll_back(count)     the last tokens of the trunk are forgotten
    store.evict(live)          slots of the trunk are freed, chosen by layer and head
    store.merge(...)           rows are added to those of other slots, before their own slots are freed
    store.pack(...)            rows of the oldest tokens go over into a coarser form
    store.narrow(layer, ...)   of what the layer before this one has read, this one and all behind it, which have read
    nothing, will read these tokens alone
    store.begin_with(other)    what another store has read becomes its trunk, held once for both or copied
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from playground.engine.attention_mask import EMPTY, Focus, LateSegment, Renumbering, Segment, Slots, Window
from playground.engine.kv_buffer import UNKNOWN, Capacity, Encode, KVBuffer, MergedTokens, MergeMap, SlotOrder, in_front

Hear = Callable[[int, Tensor, Tensor, Tensor], None]
"""hear(layer, weights [kv_heads, rows, slots], positions of the rows [rows], positions of the slots [1 or kv_heads,
slots])
"""

Ask = Callable[[int, Tensor, list[int]], None]
"""ask(layer, queries as they meet the keys [kv_heads, group, n, d], positions of the rows [n])"""


@dataclass
class Attention:
    """What rows of one forward attended to, until it is known which of them are kept. Columns: the trunk, then the
    scratch.
    """

    nodes: list[int]
    layers: dict[int, Tensor]  # [kv_heads, nodes, slots]

    def compact(self, order: Tensor, dead: Tensor, trunk: int, layers: Iterable[int]) -> None:
        """Of the first `trunk` columns of some layers only order [1 or kv_heads, n] stay; those that are `dead`, of the
        same shape, have no weight.
        """
        for layer in self.layers.keys() & set(layers):
            weights = self.layers[layer]
            index = order[:, None, :].expand(*weights.shape[:2], order.shape[1])
            stay = weights[:, :, :trunk].gather(2, index).masked_fill_(dead[:, None], 0)
            self.layers[layer] = torch.cat([stay, weights[:, :, trunk:]], 2)


@dataclass
class KVCache:
    depth: int  # decoder layers
    device: torch.device | str = "cpu"
    room: Capacity = UNKNOWN
    length: int = 0  # tokens of the trunk, evicted ones included: the true position of the next token
    parents: list[int] = field(default_factory=list)  # of the scratch nodes, within the scratch
    depths: list[int] = field(default_factory=list)  # of the scratch nodes; 0 continues the trunk
    lineage: list[int] = field(default_factory=list)  # of the scratch nodes: itself and its ancestors, one bit each
    window: Window | None = None  # what a cache policy lets decode rows see
    focus: Focus | None = None  # what it lets them see by what they attend to
    renumbering: Renumbering | None = None  # how far they stand from tokens before a gap
    hear: Hear | None = None  # told what rows attended to, once they are kept
    ask: Ask | None = None  # told what rows look for, as they are fed
    done: bool = False  # nothing more will be fed, so its memory may be wanted for another
    # whose memory its first tokens lie in; it stays as long as somebody looks into it
    begun_with: KVCache | None = None
    # tokens of the trunk whose rows were told of; one that is taken back and fed again is not told of twice
    heard: int = 0

    def __post_init__(self) -> None:
        self.keys, self.values = ([KVBuffer(self.room) for _ in range(self.depth)] for _ in range(2))
        self.slots = [Slots(torch.empty(1, 0, dtype=torch.long, device=self.device))]  # one for all layers, or one each
        self.attention: list[Attention] = []
        # keys and values of one slot in full precision, by layer; empty before the first row
        self.slot_bytes: list[int] = []
        self.quantises = False

    # --- what a forward asks for ---

    def extend(self, parents: list[int]) -> Segment:
        """New scratch nodes and the segment that feeds them. A parent is a scratch node, perhaps a new one, or -1."""
        first = len(self.parents)
        for node, parent in enumerate(parents, first):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} cannot continue node {parent}")
            self._hang(node, parent)
        return Segment(self, first, len(parents))

    def again(self, count: int) -> Segment:
        """The last `count` scratch nodes once more: layers that have not seen them will."""
        return Segment(self, len(self.parents) - count, count)

    def late(self, first: int, places: list[int]) -> LateSegment:
        """Tokens of a trunk that was narrowed, at these positions, for the layers that have not read them; they get the
        slots from `first` on.
        """
        return LateSegment(self, first, len(places), places=places)

    def _hang(self, node: int, parent: int) -> None:
        self.parents.append(parent)
        self.depths.append(0 if parent == -1 else self.depths[parent] + 1)
        self.lineage.append((0 if parent == -1 else self.lineage[parent]) | 1 << node)

    def slots_of(self, layer: int) -> Slots:
        """Positions of the slots of one layer."""
        return self.slots[layer if len(self.slots) > 1 else 0]

    # --- what moves nodes and slots ---

    def begin_with(self, other: KVCache, once: bool) -> None:
        """Take over the whole trunk of another store, which will not change any more, before anything is fed: held
        `once` for both, or as a copy.
        """
        for mine, read in zip((*self.keys, *self.values), (*other.keys, *other.values)):
            mine.begin_with(read.read(other.length), once)
        self.begun_with = other if once else None
        self.slots = [Slots(other.slots[0].positions)]
        self.length = self.heard = other.length

    def keep(self, node: int) -> list[int]:
        """Move the path down to scratch node `node` into the trunk. Returns the nodes below it that stay, renumbered
        from 0; -1 keeps none.
        """
        path = self.path(node)
        stay = self._below(node) if node != -1 else []
        self._gather([*path, *stay])
        self._lengthen(len(path))
        self._listen(path, stay)
        self._rename(stay)
        return stay

    def prune(self, nodes: list[int]) -> None:
        """Only these scratch nodes stay, ascending; every one's parent is among them."""
        self._gather(nodes)
        self._listen([], nodes)
        self._rename(nodes)

    def path(self, node: int) -> list[int]:
        path = []
        while node != -1:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def _below(self, node: int) -> list[int]:
        return [below for below, line in enumerate(self.lineage) if below != node and line >> node & 1]

    def _rename(self, stay: list[int]) -> None:
        """The scratch nodes `stay` become 0, 1, ...; a parent that does not stay has joined the trunk."""
        renumbered, parents = {old: new for new, old in enumerate(stay)}, self.parents
        self.parents, self.depths, self.lineage = [], [], []
        for new, old in enumerate(stay):
            self._hang(new, renumbered.get(parents[old], -1))

    def forget(self, left: int = 0) -> None:
        """Drop the scratch, all but the first `left` nodes, as if the others had never been fed."""
        for column in (self.parents, self.depths, self.lineage):
            del column[left:]
        self.attention = [noted for noted in self.attention if max(noted.nodes) < left]

    def _gather(self, order: list[int]) -> None:
        """Scratch slots in a new order; free of cost where the first ones stay in place."""
        if order == list(range(len(order))):
            return
        chosen = torch.tensor(order, device=self.device)
        for layer, pools in enumerate(zip(self.keys, self.values)):
            for pool in pools:
                pool.reorder(self.slots_of(layer).count, chosen)

    def _lengthen(self, count: int) -> None:
        if not count:
            return
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
        """Free trunk slots. `live` is one mask [1 or kv_heads, slots] for all layers, or one for each; returns slots
        freed over layers and heads.
        """
        if all(bool(mask.all()) for mask in live):
            return 0
        before = self.live_slots()
        if len(live) > len(self.slots):
            self.slots = [Slots(self.slots[0].positions.clone(), self.slots[0].whole) for _ in range(self.depth)]
        for index, slots in enumerate(self.slots):
            layers = range(self.depth) if len(self.slots) == 1 else (index,)
            self._compact(slots, live[index if len(live) > 1 else 0], layers)
        return before - self.live_slots()

    def _compact(self, slots: Slots, live: Tensor, layers: range | tuple[int, ...]) -> None:
        """Close the holes: live slots keep their order, every head as many places as the fullest one needs."""
        live = (
            live.expand(max(len(live), len(slots.positions)), -1) if slots.whole else live & (slots.positions != EMPTY)
        )
        counts = live.sum(1).tolist()
        if min(counts) == slots.count:
            return
        order = in_front(live, counts)
        shared = SlotOrder(order)
        for pool in (pool for layer in layers for pool in (self.keys[layer], self.values[layer])):
            pool.compact(shared, slots.count, len(self.parents))
        dead = ~live.gather(1, order)
        for noted in self.attention:
            noted.compact(order, dead, slots.count, layers)
        slots.positions = slots.positions.expand_as(live).gather(1, order)
        slots.whole = min(counts) == max(counts)
        if not slots.whole:
            slots.positions.masked_fill_(dead, EMPTY)

    def narrow(self, layer: int, onward: Tensor) -> None:
        """From `layer` on, the layers have read nothing yet, and of what the one before them holds they will hold these
        tokens alone, a mask [1, slots].
        """
        before = [torch.ones_like(self.slots_of(early).positions, dtype=torch.bool) for early in range(layer)]
        self.evict([*before, *[onward] * (self.depth - layer)])

    def merge(self, layer: int, meeting: MergeMap, added: Tensor, kept: Tensor) -> MergedTokens:
        """Slots that take others in become `kept` [k] times themselves and `added` [m] times those, keys and values
        alike; returns which tokens went.
        """
        self.keys[layer].merge(meeting, added, kept)
        self.values[layer].merge(meeting, added, kept)
        return MergedTokens.of(meeting, self.slots_of(layer).positions.expand(self.heads, -1))

    def pack(self, due: Callable[[str, int], int], encode: dict[str, Encode]) -> None:
        """Quantise rows of the oldest tokens: due("keys" or "values", rows in full precision) says how many."""
        self.quantises = True
        for part, pools in (("keys", self.keys), ("values", self.values)):
            for layer, pool in enumerate(pools):
                used = self.slots_of(layer).count
                if count := due(part, used - pool.coarse):
                    pool.pack(count, used + len(self.parents), encode[part])

    # --- attention that was watched ---

    def watch(self, segment: Segment, layer: int, weights: Tensor) -> None:
        """Note what the watched rows of a segment attended to in a layer, [kv_heads, watched, slots]."""
        nodes = [segment.first + row for row in segment.watched]
        if not (self.attention and self.attention[-1].nodes == nodes):
            self.attention.append(Attention(nodes, {}))
        self.attention[-1].layers[layer] = weights

    def _listen(self, path: list[int], stay: list[int]) -> None:
        """Tell of kept rows, and bring those of `stay` in line with the slots' new order. Called after the trunk has
        grown by the path.
        """
        if not self.attention:
            return
        held, self.attention = self.attention, []
        for noted in held:
            self._tell(noted, path)
            rows = [row for row, node in enumerate(noted.nodes) if node in stay]
            if rows:
                layers = {
                    layer: self._columns(layer, weights[:, rows], len(path), [*path, *stay])
                    for layer, weights in noted.layers.items()
                }
                self.attention.append(Attention([stay.index(noted.nodes[row]) for row in rows], layers))
        self.heard = max(self.heard, self.length)

    def _tell(self, noted: Attention, path: list[int]) -> None:
        start = self.length - len(path)
        fresh = path[max(0, self.heard - start):]
        rows = [row for row, node in enumerate(noted.nodes) if node in fresh]
        if not rows or self.hear is None:
            return
        positions = torch.tensor([start + path.index(noted.nodes[row]) for row in rows], device=self.device)
        whole = len(rows) == len(noted.nodes)
        for layer, weights in noted.layers.items():
            told = self._columns(layer, weights if whole else weights[:, rows], len(path), path)
            self.hear(layer, told, positions, self.slots_of(layer).positions)

    def _columns(self, layer: int, weights: Tensor, grown: int, order: list[int]) -> Tensor:
        """Weights with their scratch columns in a new order; columns younger than the rows are zero."""
        trunk = self.slots_of(layer).count - grown
        known = weights.shape[2] - trunk
        if order == list(range(known)):
            return weights
        scratch = weights[:, :, trunk:]
        blank = scratch.new_zeros(*scratch.shape[:2], 1)
        padded = torch.cat([scratch, blank], 2)
        chosen = torch.tensor(
            [node if node < known else known for node in order], dtype=torch.long, device=weights.device
        )
        return torch.cat([weights[:, :, :trunk], padded[:, :, chosen]], 2)

    # --- what a screen or a policy wants to know ---

    @property
    def heads(self) -> int:
        return self.keys[0].heads

    def live_slots(self) -> int:
        """Live trunk slots over all layers and heads."""
        each = self.depth if len(self.slots) == 1 else 1
        return sum(each * slots.held * (self.heads if slots.positions.shape[0] == 1 else 1) for slots in self.slots)

    def bytes(self) -> int:
        """Memory of the slots in use, trunk and scratch."""
        if self.quantises:
            return sum(pool.bytes(self.slots_of(layer).count + len(self.parents))
                       for pools in (self.keys, self.values) for layer, pool in enumerate(pools))
        if not self.heads:
            return 0
        if not self.slot_bytes:
            self.slot_bytes = [keys.bytes(1) + values.bytes(1) for keys, values in zip(self.keys, self.values)]
        if len(self.slots) == 1:
            return (self.slots[0].count + len(self.parents)) * sum(self.slot_bytes)
        return sum((slots.count + len(self.parents)) * each for slots, each in zip(self.slots, self.slot_bytes))

    @property
    def common(self) -> int:
        """First tokens that are held once for several stores."""
        return self.keys[0].common

    def common_bytes(self) -> int:
        """Memory of these, which is part of `bytes`."""
        if self.begun_with is None:
            return 0
        return sum(pool.bytes(pool.common) for pool in (*self.keys, *self.values) if pool.common)

    def packed(self) -> int:
        """Oldest tokens whose keys are held in a coarser form."""
        return self.keys[0].coarse

    def runs(self) -> list[list[list[tuple[int, int]]]]:
        """Live true positions as half-open stretches, by layer and head; one entry where all layers or heads agree."""
        gaps = [slots for slots in self.slots if not self._holds_all(slots)]
        found = iter(_stretches(gaps)) if gaps else None
        return [
            [[(0, slots.count)]] if self._holds_all(slots) else [next(found) for _ in slots.positions]
            for slots in self.slots
        ]

    def _holds_all(self, slots: Slots) -> bool:
        return slots.whole and slots.count == self.length


def _stretches(each: list[Slots]) -> list[list[tuple[int, int]]]:
    """Stretches of every head of several slots, one after another. All are found at once: head by head they would take
    as long as a small layer.
    """
    positions = torch.cat([slots.positions.flatten() for slots in each]).cpu().numpy()
    counts = [slots.count for slots in each for _ in slots.positions]
    live = positions != EMPTY
    heads, positions = numpy.repeat(numpy.arange(len(counts)), counts)[live], positions[live]
    begins = (numpy.diff(positions, prepend=EMPTY) != 1) | (numpy.diff(heads, prepend=-1) != 0)
    stretches = list(zip(positions[begins].tolist(), (positions[numpy.roll(begins, -1)] + 1).tolist()))
    bounds = numpy.searchsorted(heads[begins], numpy.arange(len(counts) + 1)).tolist()
    return [stretches[first:last] for first, last in zip(bounds, bounds[1:])]
