"""Rows of one forward that a cache policy acts between, as if each were committed before the next one is read.

A policy that acts as the text grows decides after every token what later ones see. The rows of draft tokens, and those
of texts that grow side by side, are computed in one forward all the same: in each layer they are read depth by depth,
from copies of the layer's cache on which copies of the policy have acted. Rows of one depth do not see each other, so
they are read together. What the trunk holds, and what the policy knows, changes only when tokens are committed, one
after the other again: so rejected tokens leave no trace.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.contract import DecidesByHead
from playground.decoding.acting_policy import ActingPolicy
from playground.decoding.cache_lines import Lines, LineToken, NotedWeights, changing_alone
from playground.engine.attention.segment_attention import QKV, Reach, Scoring, Segment
from playground.engine.host_copies import index_on

if TYPE_CHECKING:
    from playground.contract import CachePolicy

Followers = dict[int, list[int]]
"""Rows of a forward that follow a node, by node; those without one follow -1, the trunk."""


class End(NamedTuple):
    """A token that no other has followed yet."""

    lines: Lines
    at: LineToken


class RowsInTurn:
    """The rows that a cache policy acted between, of the scratch of one KV cache."""

    def __init__(self, acting: ActingPolicy):
        self._acting = acting
        self.active = False  # once the policy has acted on the prompt
        self._ends: dict[int, dict[int, End]] = defaultdict(dict)  # by layer and node
        self._weights: dict[tuple[int, int], NotedWeights] = {}  # by layer and node
        self._copies: list[CachePolicy] = []  # of the policy, for lines from the trunk: each serves one in every layer
        self._begun: Counter[int] = Counter()  # by layer, lines from the trunk

    def applies(self, first: int, rows: int) -> bool:
        """Whether rows are read in turn: if the policy changes something after the trunk or at a token before them."""
        acting = self._acting
        if not self.active or acting.rehearsing:
            return False
        length, depth = acting.store.length, max(acting.store.depths[first:first + rows], default=0)
        return not all(map(acting.rests, range(length + (not acting.is_due), length + depth + 1)))

    def attend(self, layer: int, segment: Segment, new: QKV, scaling: float, sliding_window: Reach,
               scoring: Scoring | None) -> Tensor:
        """Attention of the rows of a segment, [heads, rows, d], each after what the policy did at the one before."""
        output = torch.empty_like(new[0])
        for followers in _by_depth(segment):
            for lines, nodes in self._lines_to(layer, list(followers)):
                rows, real, once = _side_by_side([followers[node] for node in nodes], output.device)
                states = [part[:, rows] for part in new]
                output[:, once] = lines.read(states, scaling, sliding_window, scoring)[:, real]
                self._note(layer, lines, [[segment.first + row for row in followers[node]] for node in nodes])
        return output

    def commit(self, path: list[int], remaining: list[int]) -> None:
        """Report the attention of a node that was committed, and renumber those that remain.

        Several nodes at once were not read in turn.
        """
        store = self._acting.store
        for layer in range(store.depth if len(path) == 1 and store.length > store.reported else 0):
            if store.on_attention and (noted := self._weights.get((layer, path[0]))):
                position = torch.full((1,), store.length - 1, device=store.device)
                store.on_attention(layer, noted.row(), position, store.slots_of(layer).positions)
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
        return sum(lines.bytes for ends in self._ends.values() for lines in {end.lines for end in ends.values()})

    def _note(self, layer: int, lines: Lines, nodes: list[list[int]]) -> None:
        """Remember the nodes that each line has read."""
        for line, each in enumerate(nodes):
            for token, node in enumerate(each):
                at = LineToken(line, token)
                self._ends[layer][node] = End(lines, at)
                if noted := lines.noted(at):
                    self._weights[layer, node] = noted

    # --- lines ---

    def _lines_to(self, layer: int, nodes: list[int]) -> Iterator[tuple[Lines, list[int]]]:
        """Lines to go on from nodes of one depth, and which nodes each of them leads to."""
        if nodes == [-1]:
            yield self._from_trunk(layer), nodes
            return
        read_last: dict[Lines | None, list[int]] = defaultdict(list)
        for node in nodes:
            end = self._ends[layer].get(node)
            read_last[end and end.lines].append(node)
        together = isinstance(self._acting.policy, DecidesByHead)
        for lines, each in read_last.items():
            for some in [each] if together else [[node] for node in each]:
                yield self._continued(layer, lines, some) if lines else self._read_again(layer, some), some

    def _continued(self, layer: int, lines: Lines, nodes: list[int]) -> Lines:
        """Lines after nodes that these have read last: copies, unless nothing else may follow them."""
        ends = self._ends[layer]
        places = [ends.pop(node).at for node in nodes]
        alone = not any(end.lines is lines for end in ends.values())
        if alone and places == [LineToken(line, places[0].token) for line in range(lines.count)]:
            return lines.go_on(places[0].token)
        return lines.branched(places)

    def _from_trunk(self, layer: int) -> Lines:
        acting, number = self._acting, self._begun[layer]
        self._begun[layer] += 1
        if number == len(self._copies):
            self._copies.append(changing_alone(acting.policy))
        lines = Lines(layer, acting.beside(acting.store.twin_of_layer(layer), self._copies[number]))
        if acting.is_due:
            lines.acting.act_on(layer)
        return lines

    def _read_again(self, layer: int, nodes: list[int]) -> Lines:
        """Lines to nodes of one depth that other rows have followed, or that were not read in turn, from what is known
        of them.
        """
        lines, store = self._from_trunk(layer), self._acting.store
        trunk, scratch = store.slots_of(layer).count, len(store.parents)
        held = [buffers[layer].read(trunk + scratch) for buffers in (store.keys, store.values)]
        lines = lines.repeated(len(nodes)) if len(nodes) > 1 else lines
        for each in zip(*map(store.path, nodes)):
            states = [torch.cat([rows[:, trunk + node:trunk + node + 1] for node in each]) for rows in held]
            weights = [known for node in each if (known := self._known_weights(layer, node)) is not None]
            lines.append(states, torch.cat(weights) if len(weights) == len(each) else None)
        return lines

    def _known_weights(self, layer: int, node: int) -> Tensor | None:
        """Attention weights of a node over the slots it saw and itself, [kv_heads, 1, slots + 1], if they are known."""
        noted = self._weights.get((layer, node))
        if noted:
            return noted.row()
        store = self._acting.store
        found = [(each, each.nodes.index(node)) for each in store.attention if node in each.nodes]
        if not found:
            return None
        recorded, row = found[0]
        trunk = store.slots_of(layer).count
        seen = index_on([*range(trunk), *(trunk + other for other in store.path(node))], store.device)
        return recorded.layers[layer][:, row:row + 1, seen]


def _by_depth(segment: Segment) -> Iterator[Followers]:
    """The rows of a segment by the nodes they follow, for each depth in the tree in turn."""
    store = segment.store
    depths: dict[int, Followers] = {}
    for row in range(segment.rows):
        node = segment.first + row
        depths.setdefault(store.depths[node], {}).setdefault(store.parents[node], []).append(row)
    for _, followers in sorted(depths.items()):
        yield followers


def _side_by_side(each: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | slice, Tensor]:
    """Rows of several lines, as many of each: the first of a line is repeated. Which of these are no repetitions, and
    the rows without them.
    """
    most = max(map(len, each))
    rows = [row for own in each for row in [*own, *[own[0]] * (most - len(own))]]
    once = [row for own in each for row in own]
    real = [most * line + at for line, own in enumerate(each) for at in range(len(own))]
    return index_on(rows, device), slice(None) if once == rows else index_on(real, device), index_on(once, device)
