"""Rows of one forward that a cache policy acts between, as if each were committed before the next one is read.

A policy that acts as the text grows decides after every token what later ones see. The rows of draft tokens, and those
of texts that grow side by side, are computed in one forward all the same: in each layer they pass one after the other
through a copy of the layer's cache, on which a copy of the policy acts. What the trunk holds, and what the policy
knows, changes only when tokens are committed, one after the other again: so rejected tokens leave no trace.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from playground.engine.attention.segment_attention import QKV, Reach, Scoring, Segment
from playground.engine.cache.kv_cache import Attention, KVCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from playground.contract import CachePolicy


class Manager(Protocol):
    """What connects a policy to a cache (`decoding.cache_manager.CacheManager`)."""

    policy: CachePolicy
    store: KVCache
    rehearsing: bool  # whether probe tokens are read

    @property
    def is_due(self) -> bool:
        """Whether tokens were committed since the policy acted."""
        raise NotImplementedError

    def watch(self) -> Callable[[int], bool] | None:
        """By position, whether the policy wants a row's attention; None if it wants none."""
        raise NotImplementedError

    def act_on(self, layer: int) -> None:
        """Let the policy act on one layer after a token was committed."""
        raise NotImplementedError

    def beside(self, store: KVCache, policy: CachePolicy) -> Manager:
        """The same for a copy of the policy and a copy of the cache."""
        raise NotImplementedError


@dataclass(eq=False)
class Line:
    """The cache of one layer after some tokens that are not committed, with the policy that acted on it.

    Its scratch holds the tokens that may come next.
    """

    layer: int
    manager: Manager

    def read(self, new: QKV, scaling: float, sliding_window: Reach, scoring: Scoring | None) -> Tensor:
        """Attention of tokens that may come next, each in place of the others, [heads, n, d]."""
        return self._begin(new[0].shape[1]).attend(self.layer, new, scaling, sliding_window, scoring)

    def go_on(self, token: int) -> Line:
        """Commit one of the tokens read last; the policy acts on it."""
        self.manager.store.commit(token)
        self.manager.act_on(self.layer)
        return self

    def branched(self, token: int) -> Line:
        """A copy that goes on with one of the tokens read last."""
        store = self.manager.store
        slots = store.slots[0].count + token + 1
        states = [buffers[self.layer].read(slots)[:, -1:] for buffers in (store.keys, store.values)]
        policy, twin = changing_alone(self.manager.policy), store.twin_of_layer(self.layer)
        line = Line(self.layer, self.manager.beside(twin, policy))
        return line.append(states, self.weights(token))

    def append(self, states: list[Tensor], weights: Tensor | None) -> Line:
        """Go on with a token of which the key and value states, and the attention weights, are known."""
        self._begin(1).write(self.layer, *states)
        self.manager.store.attention = [] if weights is None else [Attention([0], {self.layer: weights})]
        return self.go_on(0)

    def weights(self, token: int) -> Tensor | None:
        """Attention weights of one of the tokens read last over the slots and itself, [kv_heads, 1, slots + 1].

        None if the policy does not read them.
        """
        store = self.manager.store
        if not store.attention:
            return None
        weights, slots = store.attention[-1].layers[self.layer], store.slots[0].count
        own = weights[:, token:token + 1]
        return torch.cat([own[:, :, :slots], own[:, :, slots + token:slots + token + 1]], 2)

    @property
    def bytes(self) -> int:
        """Memory of its keys and values."""
        store, slots = self.manager.store, self.manager.store.slots[0].count
        return store.keys[self.layer].bytes(slots) + store.values[self.layer].bytes(slots)

    def _begin(self, count: int) -> Segment:
        segment = self.manager.store.extend([-1] * count)
        watches = self.manager.watch()
        if watches and watches(segment.positions[0]):
            segment.watched = list(range(count))
        return segment


class End(NamedTuple):
    """A token that no other has followed yet."""

    line: Line
    token: int  # among those that the line has read last


class RowsInTurn:
    """The rows that a cache policy acted between, of the scratch of one KV cache."""

    def __init__(self, manager: Manager):
        self._manager = manager
        self.active = False  # once the policy has acted on the prompt
        self._ends: dict[int, dict[int, End]] = defaultdict(dict)  # by layer and node
        self._weights: dict[tuple[int, int], Tensor] = {}  # by layer and node, as `Line.weights`
        self._copies: list[CachePolicy] = []  # of the policy, for lines from the trunk: each serves one in every layer
        self._begun: Counter[int] = Counter()  # by layer, lines from the trunk

    def applies(self, first: int, rows: int) -> bool:
        """Whether rows are read in turn. A single row after a trunk that the policy has acted on sees what it should.
        """
        return self.active and not self._manager.rehearsing and (rows > 1 or first > 0 or self._manager.is_due)

    def attend(self, layer: int, segment: Segment, new: QKV, scaling: float, sliding_window: Reach,
               scoring: Scoring | None) -> Tensor:
        """Attention of the rows of a segment, [heads, rows, d], each after what the policy did at the one before."""
        parents, output = segment.store.parents[segment.first:segment.end], torch.empty_like(new[0])
        for parent in dict.fromkeys(parents):
            rows = [row for row, other in enumerate(parents) if other == parent]
            line = self._line_to(layer, parent)
            output[:, rows] = line.read([states[:, rows] for states in new], scaling, sliding_window, scoring)
            self._note(layer, line, [segment.first + row for row in rows])
        return output

    def commit(self, path: list[int], remaining: list[int]) -> None:
        """Report the attention of a node that was committed, and renumber those that remain.

        Several nodes at once were not read in turn.
        """
        store = self._manager.store
        for layer in range(store.depth if len(path) == 1 and store.length > store.reported else 0):
            if (weights := self._weights.get((layer, path[0]))) is not None:
                position = torch.full((1,), store.length - 1, device=store.device)
                store.on_attention(layer, weights, position, store.slots_of(layer).positions)
        self.keep_only(remaining)

    def keep_only(self, nodes: list[int]) -> None:
        """Only these nodes remain in the scratch; they are renumbered from 0."""
        numbers = {old: new for new, old in enumerate(nodes)}
        for layer, ends in self._ends.items():
            self._ends[layer] = {numbers[node]: end for node, end in ends.items() if node in numbers}
        self._weights = {
            (layer, numbers[node]): weights for (layer, node), weights in self._weights.items() if node in numbers
        }
        if not any(self._ends.values()):
            self._copies, self._begun = [], Counter()

    def bytes(self) -> int:
        """Memory of the keys and values that its lines hold beside the trunk."""
        return sum(line.bytes for ends in self._ends.values() for line in {end.line for end in ends.values()})

    def _note(self, layer: int, line: Line, nodes: list[int]) -> None:
        """Remember nodes that a line has read."""
        for token, node in enumerate(nodes):
            self._ends[layer][node] = End(line, token)
            if (weights := line.weights(token)) is not None:
                self._weights[layer, node] = weights

    def _line_to(self, layer: int, node: int) -> Line:
        """The line to a node, -1 for the trunk, to go on from."""
        if node == -1:
            return self._from_trunk(layer)
        ends = self._ends[layer]
        if node not in ends:
            return self._read_again(layer, node)
        line, token = ends.pop(node)
        return line.branched(token) if any(end.line is line for end in ends.values()) else line.go_on(token)

    def _from_trunk(self, layer: int) -> Line:
        manager, number = self._manager, self._begun[layer]
        self._begun[layer] += 1
        if number == len(self._copies):
            self._copies.append(changing_alone(manager.policy))
        line = Line(layer, manager.beside(manager.store.twin_of_layer(layer), self._copies[number]))
        if manager.is_due:
            line.manager.act_on(layer)
        return line

    def _read_again(self, layer: int, node: int) -> Line:
        """The line to a node that another row has followed, from what is known of its tokens."""
        line, store = self._from_trunk(layer), self._manager.store
        for each in store.path(node):
            slots = store.slots_of(layer).count + each + 1
            states = [buffers[layer].read(slots)[:, -1:] for buffers in (store.keys, store.values)]
            line.append(states, self._weights.get((layer, each), self._recorded(layer, each)))
        return line

    def _recorded(self, layer: int, node: int) -> Tensor | None:
        """Attention weights of a node that was read alone, after the trunk."""
        found = [each.layers[layer] for each in self._manager.store.attention if each.nodes == [node]]
        return found[0] if found else None


def changing_alone(state: Any) -> Any:
    """A copy of a policy, or of a part of it, that changes on its own. Tensors are shared: policies replace them."""
    if isinstance(state, dict):
        return type(state)(*[state.default_factory] if isinstance(state, defaultdict) else [], {
            key: changing_alone(value) for key, value in state.items()
        })
    if isinstance(state, list | set):
        return type(state)(map(changing_alone, state))
    if isinstance(state, Tensor) or not hasattr(state, "__dict__") or callable(state):
        return state
    if hasattr(type(state), "__deepcopy__"):
        return deepcopy(state)
    alone = copy(state)
    vars(alone).update({name: changing_alone(value) for name, value in vars(state).items()})
    return alone
