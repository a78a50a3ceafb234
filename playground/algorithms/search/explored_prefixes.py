"""Tree of the prefixes that a search has explored, so that common prefixes are read once."""
from __future__ import annotations

from dataclasses import dataclass, field

from playground.contract.token_tree import ROOT, TokenTree


@dataclass
class Explored:
    """The tree of all prefixes, for `lm.extend`, and an index of its nodes."""

    tree: TokenTree
    known: dict[tuple[int, int], int] = field(default_factory=dict)  # node, by parent node and token

    def place(self, token: int, parent: int) -> int:
        """The node of a token after `parent`, added if there is none yet."""
        if (parent, token) not in self.known:
            self.known[parent, token] = self.tree.add(token, parent)
        return self.known[parent, token]

    def follow(self, tokens: list[int], parent: int = ROOT) -> int:
        """The node of the last of these tokens after `parent`."""
        for token in tokens:
            parent = self.place(token, parent)
        return parent
