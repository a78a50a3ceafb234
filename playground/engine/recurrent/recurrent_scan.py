"""How recurrent layers compute the rows of one forward: as chains that continue known states, batch by batch."""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from playground.engine.recurrent.recurrent_state import ORIGIN, BatchState, State

if TYPE_CHECKING:
    from playground.engine.attention.segment_attention import Segment

Output = Tensor | tuple[Tensor | None, ...]
Place = tuple[int, int]
"""An entry of a trail: the index of its segment in the call, and its number in the trail."""


class ChainMixer(Protocol):
    """The part of a recurrent layer that reads its state (`engine.recurrent_layers.Mixer`)."""

    number: int  # of its layer among the recurrent ones

    def run(self, hidden: Tensor, states: BatchState) -> Output:
        """Outputs for chains [B, n, d] that continue `states`, which are updated."""


@dataclass
class Group:
    """Chains of equal length n that a mixer computes as one batch [B, n, d]."""

    chains: list[list[Place]]
    parents: list[Place]
    rows: Tensor | None = None  # index of their rows, [B * n]; None if these are all rows in order
    follows: bool = False  # each chain continues that of the group before it, and nothing else does
    ends: list[tuple[int, Place]] = field(default_factory=list)  # chains whose last state is needed, by index


class Scan:
    """The rows that the mixers compute in one forward, and in which batches. It is the same in every recurrent layer.

    A chain continues the state of its parent. If that is not held, the rows since the nearest state that is are
    computed again from their inputs.
    """

    def __init__(self, segments: list[Segment], steps: float):
        """Chains of up to `steps` rows are computed row by row, longer ones in one call."""
        self._segments, self._steps = segments, steps
        self._memories = [segment.store.recurrent for segment in segments]
        self._parents: dict[Place, Place] = {}  # of all rows
        for index in range(len(segments)):
            self._find_rows(index)
        self._children: dict[Place, int] = defaultdict(int)
        for parent in self._parents.values():
            self._children[parent] += 1
        new = [(index, entry) for index in range(len(segments)) for entry in self._new(index)]
        self._again = sorted(self._parents.keys() - set(new))
        chains = self._chains()
        self._held = self._choose_held(chains)
        self._groups = self._batches(chains)
        self._order = self._place_rows([*new, *self._again], len(new))
        self._results: dict[int, dict[Place, State]] = {}  # states to hold, by recurrent layer

    # --- rows and chains ---

    def _new(self, index: int) -> range:
        """Entries of the new rows of a segment."""
        segment, tail = self._segments[index], self._memories[index].tail
        return range(tail + segment.first, tail + segment.end)

    def _find_rows(self, index: int) -> None:
        """The new rows of a segment, and the rows before them as far back as states are missing."""
        memory, nodes = self._memories[index], self._segments[index].store.parents
        for entry in self._new(index):
            while entry not in memory.states and (index, entry) not in self._parents:
                self._parents[index, entry] = index, memory.parent(entry, nodes)
                entry = memory.parent(entry, nodes)

    def _chains(self) -> list[list[Place]]:
        """All rows as chains, parents first."""
        chains: list[list[Place]] = []
        ending: dict[Place, list[Place]] = {}  # chains by their last row
        for place in sorted(self._parents):
            parent = self._parents[place]
            if parent in ending and self._children[parent] == 1 and not self._ends_trunk(parent):
                chain = ending.pop(parent)
            else:
                chains.append(chain := [])
            chain.append(place)
            ending[place] = chain
        return [part for chain in chains for part in self._cut(chain)]

    def _ends_trunk(self, place: Place) -> bool:
        """Whether a row is the last token of the trunk: all later rows begin at its state."""
        return place[1] == self._memories[place[0]].tail - 1

    def _cut(self, chain: list[Place]) -> list[list[Place]]:
        """A chain in one piece, as the beginning of a text always is, or row by row."""
        whole = len(chain) > self._steps or self._begins(self._parents[chain[0]])
        return [chain] if whole else [[place] for place in chain]

    def _choose_held(self, chains: list[list[Place]]) -> set[Place]:
        """Rows whose states are held after the forward."""
        held: set[Place] = set()
        for index, memory in enumerate(self._memories):
            new = self._new(index)
            ends = [chain[-1] for chain in chains if chain[-1][0] == index]
            computed = [place for place in ends if place[1] in new]
            leaves = [place for place in computed if not self._children[place]]
            if not memory.has_room(len(computed)) and len(leaves) < len(computed):
                computed = [max(leaves)]  # draft tokens, most of which are dropped
            held |= {*computed, *filter(self._ends_trunk, ends)}
        return held

    # --- batches ---

    def _batches(self, chains: list[list[Place]]) -> list[Group]:
        """Chains that can be computed together, in an order in which every chain comes after its parent."""
        levels: dict[Place, int] = {}
        groups: dict[tuple, Group] = defaultdict(lambda: Group([], []))
        for chain in chains:
            parent = self._parents[chain[0]]
            level = levels[chain[-1]] = levels.get(parent, -1) + 1
            group = groups[level, len(chain), not level and self._begins(parent)]
            group.chains.append(chain)
            group.parents.append(parent)
        ordered = [groups[key] for key in sorted(groups)]
        for before, group in zip([None, *ordered], ordered):
            group.follows = before is not None and self._follows(group, before)
        for group, after in zip(ordered, [*ordered[1:], None]):
            needed = self._held if after is not None and after.follows else self._held | self._children.keys()
            group.ends = [(i, chain[-1]) for i, chain in enumerate(group.chains) if chain[-1] in needed]
        return ordered

    def _begins(self, place: Place) -> bool:
        """Whether a chain after `place` begins the text."""
        return place[1] == ORIGIN and not any(self._memories[place[0]].states[ORIGIN])

    def _follows(self, group: Group, before: Group) -> bool:
        ends = [chain[-1] for chain in before.chains]
        return group.parents == ends and all(self._children[end] == 1 for end in ends)

    def _place_rows(self, rows: list[Place], new: int) -> Tensor | None:
        """Set the row indices of all groups; returns where the new rows are in their outputs, None if in order."""
        device = self._segments[0].store.device
        number = {place: i for i, place in enumerate(rows)}
        outputs: list[int] = []
        for group in self._groups:
            indices = [number[place] for chain in group.chains for place in chain]
            outputs += indices
            if indices != list(range(len(rows))):
                group.rows = torch.tensor(indices, device=device)
        if outputs == list(range(new)):
            return None
        at = {row: i for i, row in enumerate(outputs)}
        return torch.tensor([at[row] for row in range(new)], device=device)

    # --- in each recurrent layer ---

    def run(self, mixer: ChainMixer, hidden: Tensor) -> Output:
        """Outputs of a mixer for the new rows, [1, rows, ...], of its inputs [1, rows, d]."""
        inputs, states, computed, outputs = self._inputs(mixer.number, hidden[0]), None, {}, []
        for group in self._groups:
            if not group.follows:
                states = BatchState([self._state(place, mixer.number, computed) for place in group.parents])
            rows = inputs if group.rows is None else inputs[group.rows]
            batch = rows.unflatten(0, (len(group.chains), -1))
            outputs.append(_by_row(mixer.run(batch, states), batch))
            computed |= {place: states.row(i) for i, place in group.ends}
        self._results[mixer.number] = {place: computed[place] for place in self._held}
        return self._in_order(outputs)

    def _inputs(self, layer: int, hidden: Tensor) -> Tensor:
        """Inputs [n, d] of the new rows, which are stored, and of those computed again."""
        parts = hidden.split([segment.rows for segment in self._segments])
        for index, (memory, part) in enumerate(zip(self._memories, parts)):
            memory.inputs[layer].write(self._new(index).start, part)
        if not self._again:
            return hidden
        return torch.cat([hidden, torch.stack([self._memories[i].inputs[layer].rows[n] for i, n in self._again])])

    def _state(self, place: Place, layer: int, computed: dict[Place, State]) -> State:
        """The state of one layer after a row, from this forward or an earlier one."""
        return computed[place] if place in computed else self._memories[place[0]].states[place[1]][layer]

    def _in_order(self, outputs: list[Output]) -> Output:
        """The outputs [B, n, ...] of all groups as rows [1, rows, ...]; a mixer may return several tensors."""
        if outputs[0] is None:
            return None
        if isinstance(outputs[0], tuple):
            return tuple(self._in_order(list(parts)) for parts in zip(*outputs))
        flat = [output.flatten(0, 1) for output in outputs]
        joined = flat[0] if len(flat) == 1 else torch.cat(flat)
        return (joined if self._order is None else joined[self._order])[None]

    def settle(self) -> None:
        """After the forward: let the caches hold the states."""
        if not self._results:
            return
        for index, memory in enumerate(self._memories):
            entries = [entry for i, entry in self._held if i == index]
            found = {entry: [self._results[layer][index, entry] for layer in range(memory.layers)] for entry in entries}
            memory.hold(found, self._segments[index].store.parents)


def as_tuple(output: Output) -> tuple[Tensor | None, ...]:
    return output if isinstance(output, tuple) else (output,)


def _by_row(output: Output, batch: Tensor) -> Output:
    """What a mixer returns for a batch [B, n, d], with None for tensors that are not [B, n, ...]."""
    if isinstance(output, tuple):
        return tuple(_by_row(part, batch) for part in output)
    return output if output is not None and output.shape[:2] == batch.shape[:2] else None
