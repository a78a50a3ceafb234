"""Sequences of a lane that grow side by side."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.lane.handed_back import handed_back
from playground.decoding.lane.streams import ModelStreams
from playground.decoding.sequence import Sequence
from playground.events import Branches

if TYPE_CHECKING:
    from playground.contract.interfaces import SequenceInterface


class Branching(ModelStreams):
    """The text with the sequences that were forked from it, whose tokens form one tree in the KV caches."""

    def _start(self, prompt: list[int]) -> None:
        super()._start(prompt)
        self.leaves: dict[int, Sequence] = {}  # parallel sequences by number, without dropped ones
        self._forked, self._branches = 0, TokenTree()

    def fork(self, count: int, leaf: SequenceInterface | None = None) -> list[Sequence]:
        parent = self.main if leaf is None else handed_back(leaf, Sequence)
        if parent is self.main:  # its tokens are committed, whichever sequence generated them
            parent.node, parent.placed = ROOT, len(parent.tokens)
        children = [parent.fork(self._forked + i) for i in range(1, count + 1)]
        self._forked += count
        self.leaves |= {child.number: child for child in children}
        self.record(Branches(born=[(child.number, parent.number) for child in children]))
        return children

    def drop(self, leaves: Iterable[SequenceInterface]) -> None:
        dropped = [leaf.number for leaf in leaves]
        if dropped:
            self.leaves = {number: leaf for number, leaf in self.leaves.items() if number not in dropped}
            self.record(Branches(dropped=dropped))
            self._prune()

    def branch_tree(self, leaves: list[Sequence]) -> TokenTree:
        self._prune()
        added: dict[tuple[int, int], int] = {}  # by parent and token: equal new tokens share a node
        for leaf in leaves:
            for token in leaf.tokens[leaf.placed:]:
                edge = (leaf.node, token)
                if edge not in added:
                    added[edge] = self._branches.add(token, leaf.node)
                leaf.node = added[edge]
            leaf.placed = len(leaf.tokens)
        return self._branches

    def _prune(self) -> None:
        """Free the nodes on no path of a sequence that is still growing."""
        growing = [leaf for leaf in self.leaves.values() if not leaf.reason]
        needed = sorted({node for leaf in growing for node in self._branches.path(leaf.node)})
        if len(needed) == len(self._branches):
            return
        before, self._branches = self._branches, self._branches.only(needed)
        renumbered = {old: new for new, old in enumerate(needed)} | {ROOT: ROOT}
        for leaf in growing:
            leaf.node = renumbered[leaf.node]
        for stream in self._streams.values():
            stream.prune(before, needed, self._branches)
