"""The tree of tokens that a KV cache has read but not committed."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy

ROOT = -1  # the parent of a node that continues the committed text


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes of a tree from a child of the root down to `node`, by the parent of each; empty for the root."""
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass(kw_only=True)
class ScratchTree:
    """Tokens that have been fed but not committed, such as draft tokens: nodes, numbered as they were fed.

    The parent of a node is one before it, or -1, the end of the committed text.
    """

    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 0 continues the committed text
    lineage: list[int] = field(default_factory=list)  # of each node: itself and its ancestors, one bit each
    absent: dict[int, set[int]] = field(default_factory=dict)  # by layer, nodes that left it no states

    def path(self, node: int) -> list[int]:
        """The nodes from the committed text to a node, itself included."""
        return path_to(node, self.parents)

    def ancestors(self, first: int, end: int) -> numpy.ndarray:
        """Which nodes each node from `first` to `end` descends from, itself included, [end - first, end] of 0 and 1."""
        size = -(-end // 8)
        lines = b"".join(line.to_bytes(size, "little") for line in self.lineage[first:end])
        packed = numpy.frombuffer(lines, numpy.uint8).reshape(end - first, size)
        return numpy.unpackbits(packed, axis=1, count=end, bitorder="little")

    def leave_out(self, layer: int, nodes: Iterable[int]) -> None:
        """Nodes leave no states in a layer: nobody sees their slots there, which are freed when they are committed."""
        self.absent.setdefault(layer, set()).update(nodes)

    def _add_nodes(self, parents: list[int]) -> int:
        """Append nodes; returns the first. Raises ValueError for a parent that does not come before its child."""
        first = len(self.parents)
        for node, parent in enumerate(parents, first):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} cannot continue node {parent}")
            self._add_node(parent)
        return first

    def _add_node(self, parent: int) -> None:
        line = 1 << len(self.parents)
        self.parents.append(parent)
        self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
        self.lineage.append(line if parent == ROOT else self.lineage[parent] | line)

    def _take_path(self, node: int) -> tuple[list[int], list[int]]:
        """Take the path to a node out of the tree, of which only the node's descendants remain; returns both."""
        path = self.path(node)
        below = [other for other, line in enumerate(self.lineage) if other != node and line >> node & 1] if path else []
        self._keep_nodes(below)
        return path, below

    def _keep_nodes(self, kept: list[int]) -> None:
        """Only these nodes remain, numbered from 0. A parent that is not among them was committed."""
        numbers, parents = {old: new for new, old in enumerate(kept)}, self.parents
        self.parents, self.depths, self.lineage = [], [], []
        for old in kept:
            self._add_node(numbers.get(parents[old], ROOT))
        if self.absent:
            left = {layer: {numbers[node] for node in nodes if node in numbers} for layer, nodes in self.absent.items()}
            self.absent = {layer: nodes for layer, nodes in left.items() if nodes}

    def _crop_nodes(self, count: int) -> None:
        """Only the first `count` nodes remain."""
        for column in (self.parents, self.depths, self.lineage):
            del column[count:]
        if self.absent:
            left = {layer: {node for node in nodes if node < count} for layer, nodes in self.absent.items()}
            self.absent = {layer: nodes for layer, nodes in left.items() if nodes}
