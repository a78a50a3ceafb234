"""Recurrent and convolution states: what layers without keys and values remember of a text, one state for each token.

Such a layer cannot drop a token it has read. So a cache holds the states of few tokens and the layer inputs of those
after them, from which any other state can be computed again without a forward of the whole model.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

State = dict[tuple[str, int], Tensor]
"""State of one layer after one token, by kind ("conv" or "recurrent") and number, without a batch dimension; empty
before the first token."""

ORIGIN = -1  # the entry before the first one of a trail
REWIND = 16  # tokens of the trunk that can at least be removed without reading the text again
SNAPSHOTS = 64 << 20  # bytes up to which the state after every token of a draft is held; of a larger one few are


class BatchState:
    """The states of several chains of equal length, as the cache that a layer of the transformers library updates.

    It has the methods of `transformers.cache_utils.Cache` that such layers call, for one layer.
    """

    def __init__(self, states: Sequence[State]):
        self.states = {key: torch.stack([state[key] for state in states]) for key in states[0]}

    def row(self, index: int) -> State:
        """A copy of the state of one chain: layers update theirs in place."""
        return {key: states[index].clone() for key, states in self.states.items()}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0,
                          conv_kernel_size: int | None = None, **_: Any) -> Tensor:
        """Append inputs [B, channels, n] of the convolution; returns them after those of the state."""
        key, before = ("conv", state_idx), self.states.get(("conv", state_idx))
        width = before.shape[-1] if before is not None else conv_kernel_size or conv_states.shape[-1]
        if before is None:
            whole = pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            whole = torch.cat([before, conv_states], -1)
        self.states[key] = whole[..., -width:].clone()
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace the recurrent state; it stays in the dtype it began in, as in the library."""
        key = ("recurrent", state_idx)
        before = self.states.get(key)
        self.states[key] = recurrent_states if before is None else recurrent_states.to(before.dtype)
        return self.states[key]

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The recurrent state, as minimax calls it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)


class InputRows:
    """Inputs [n, d] of one layer, in memory that grows by half; [n] where these are token ids."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 before the first."""
        return 0 if self.rows is None else math.prod(self.rows.shape[1:]) * self.rows.element_size()

    def write(self, at: int, rows: Tensor) -> None:
        """Write rows [n, d] from row `at` on."""
        end = at + len(rows)
        if self.rows is None or end > len(self.rows):
            grown = rows.new_empty(end + end // 2, *rows.shape[1:])
            if at:
                grown[:at] = self.rows[:at]
            self.rows = grown
        self.rows[at:end] = rows

    def select(self, order: list[int]) -> None:
        """Hold only these rows, in this order."""
        if self.rows is not None and order != list(range(len(order))):
            self.rows = self.rows[order]

    def copy(self) -> InputRows:
        other = InputRows()
        other.rows = None if self.rows is None else self.rows.clone()
        return other


class RecurrentMemory:
    """States of all recurrent layers of one KV cache.

    Its *trail* consists of the last tokens of the trunk, from a token with a known state on, and of all scratch nodes.
    Entry i is the i-th of them. Inputs of every entry are held, and the states of some. Every other state follows from
    the nearest known one before it, by running the recurrent layers alone over the inputs in between. A forward that
    continues an entry without a state does so (`engine.recurrent_scan`).

    The nodes of a tree may branch: each continues the state of its own parent.
    """

    def __init__(self, layers: int, least_chunk: int = 0):
        """`least_chunk`: rows that a forward should have at least, if the text has that many."""
        self.layers, self.least_chunk = layers, least_chunk
        self.tail = 0  # trunk tokens of the trail
        self.inputs = [InputRows() for _ in range(layers)]
        self.states: dict[int, list[State]] = {ORIGIN: [{} for _ in range(layers)]}  # by entry, one for each layer
        self._middle = ORIGIN  # a trunk entry with a known state, which becomes the origin when the tail is long

    def parent(self, entry: int, parents: list[int]) -> int:
        """The entry before an entry; `parents` are those of the scratch nodes."""
        if entry < self.tail:
            return entry - 1
        node = parents[entry - self.tail]
        return self.tail + node if node >= 0 else self.tail - 1

    @property
    def state_bytes(self) -> int:
        """Bytes of one state in all layers; 0 before the first forward."""
        return self._bytes_of(max(self.states))

    def _bytes_of(self, entry: int) -> int:
        return sum(part.numel() * part.element_size() for state in self.states[entry] for part in state.values())

    def bytes(self, scratch: int) -> int:
        """Bytes of all states, and of the inputs of the trail with `scratch` nodes."""
        inputs = (self.tail + scratch) * sum(own.row_bytes for own in self.inputs)
        return inputs + sum(map(self._bytes_of, self.states))

    def has_room(self, count: int) -> bool:
        """Whether states so small that memory does not matter can be held for `count` more entries."""
        return (len(self.states) + count) * self.state_bytes <= SNAPSHOTS

    def hold(self, found: dict[int, list[State]], parents: list[int]) -> None:
        """Hold these states; `parents` are those of the scratch nodes. Large ones only where a text may continue."""
        self.states |= found
        if not self.has_room(0):
            inner = {self.tail + parent for parent in parents if parent >= 0}
            self.states = {entry: state for entry, state in self.states.items() if entry not in inner}

    def start_from(self, other: RecurrentMemory) -> None:
        """Begin with the trail of another memory that has no scratch. States are never written to, so both share them.
        """
        self.tail, self._middle = other.tail, other._middle
        self.inputs, self.states = [own.copy() for own in other.inputs], dict(other.states)

    def commit(self, path: list[int], remaining: list[int]) -> None:
        """Scratch nodes `path` continue the trunk, and `remaining` stay in the scratch; all others are dropped."""
        tail = self.tail
        self._select([*range(tail), *(tail + node for node in (*path, *remaining))])
        self.tail = tail + len(path)
        self._drop_states()
        self._shorten()

    def prune(self, nodes: list[int]) -> None:
        """Keep only these scratch nodes, ascending."""
        self._select([*range(self.tail), *(self.tail + node for node in nodes)])

    def crop_scratch(self, count: int) -> None:
        """Drop the scratch except its first `count` nodes."""
        self.states = {entry: state for entry, state in self.states.items() if entry < self.tail + count}

    def roll_back(self, count: int) -> bool:
        """Drop the scratch and the last `count` tokens of the trunk. False if they began before the trail."""
        if count > self.tail:
            return False
        self.tail -= count
        self.crop_scratch(0)
        if self._middle >= self.tail:
            self._middle = ORIGIN
        return True

    def _select(self, order: list[int]) -> None:
        for own in self.inputs:
            own.select(order)
        renumbered = {old: new for new, old in enumerate(order)} | {ORIGIN: ORIGIN}
        self.states = {renumbered[old]: state for old, state in self.states.items() if old in renumbered}

    def _drop_states(self) -> None:
        """Drop the states of trunk entries that are neither the last known one nor needed to roll back."""
        newest = self._newest()
        held = {ORIGIN, self._middle, newest}
        self.states = {entry: state for entry, state in self.states.items() if entry in held or entry >= self.tail}

    def _newest(self) -> int:
        """The last trunk entry whose state is known."""
        return max(entry for entry in self.states if entry < self.tail)

    def _shorten(self) -> None:
        """Begin the trail at a later state once enough tokens follow it."""
        newest = self._newest()
        if newest - self._middle < REWIND:
            return
        start = newest if newest - self._middle >= 4 * REWIND else self._middle
        self._middle = newest
        if start != ORIGIN:
            self._begin_after(start)

    def _begin_after(self, start: int) -> None:
        """Entry `start` becomes the origin."""
        moved = start + 1
        for own in self.inputs:
            own.rows = None if own.rows is None else own.rows[moved:].clone()
        self.states = {entry - moved: state for entry, state in self.states.items() if entry >= start}
        self.tail, self._middle = self.tail - moved, self._middle - moved
