"""Beginnings of a text that a strategy has looked at, each of them once, so that what two have in common is read once.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from playground.contract.token_tree import ROOT, TokenTree


@dataclass
class Explored:
    """The tree of all beginnings, for `lm.extend`, and where in it each of them ends."""

    tree: TokenTree
    known: dict[tuple[int, int], int] = field(default_factory=dict)  # node of a token after another node

    def place(self, token: int, parent: int) -> int:
        """The node of a token after `parent`, made where there is none yet."""
        if (parent, token) not in self.known:
            self.known[parent, token] = self.tree.add(token, parent)
        return self.known[parent, token]

    def follow(self, tokens: list[int], parent: int = ROOT) -> int:
        """The node of the last of some tokens that follow `parent`."""
        for token in tokens:
            parent = self.place(token, parent)
        return parent
