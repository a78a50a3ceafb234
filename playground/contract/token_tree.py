"""Token trees: draft tokens that continue the committed text, as a list in topological order.

Node i holds a token and the index of its parent; -1 is the root, the last committed token, which is not in the list.
A chain is a tree in which node i has parent i - 1. Nodes are only appended, so a tree can be read while it grows.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from playground.engine.cache.scratch_tree import ROOT, path_to
from playground.events import Draft, Drawn

if TYPE_CHECKING:
    import torch

UNREAD = -1  # in place of a token that only the device knows


@dataclass
class TokenTree:
    """Tokens with parents, and how they were drawn.

    q[i] is the distribution [V] that node i was drawn from, None if it was chosen deterministically. confidences[i] is
    the drafter's probability of the token, on the device of q until `confidence` is read; it is displayed, and no
    verifier reads it. `order` lists nodes in the order of drawing: a node that was drawn several times is read once and
    listed several times. `blends` maps nodes that represent several tokens to (tokens, weights): their input is the
    weighted mean of the tokens' embeddings. `probes` maps nodes, or the root, to embeddings [k, hidden_size]: inputs of
    k further rows after the node, each after the one before. No draft token sees them and they are never committed; the
    target's logits for them are `Rows.probes`. With `entering`, (layer, function), the inputs of that layer for the
    probes of all nodes, [nodes, k, hidden_size], are the function's value for those of the nodes, [nodes, hidden_size].
    `unread` are the tokens [n] of the last n nodes on a device, whose `tokens` are still UNREAD: only a stream that
    `takes_unread` reads such a tree.
    """

    source: str = ""
    drawn: Drawn = "deterministic"
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    q: list[torch.Tensor | None] = field(default_factory=list)
    confidences: list[float | torch.Tensor] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    blends: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    probes: dict[int, torch.Tensor] = field(default_factory=dict)
    entering: tuple[int, Callable[[torch.Tensor], torch.Tensor]] | None = None
    unread: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        token: int,
        parent: int = ROOT,
        q: torch.Tensor | None = None,
        confidence: float | torch.Tensor | None = None,
    ) -> int:
        """Append a node and return its index. Children of one parent are verified in the order they were added."""
        node = len(self.tokens)
        if not ROOT <= parent < node:
            raise ValueError(f"parent {parent} is not in a tree of {node} nodes")
        self.tokens.append(token)
        self.parents.append(parent)
        self.q.append(q)
        if confidence is None:
            confidence = 1.0 if q is None else q[token]
        self.confidences.append(confidence)
        self.order.append(node)
        return node

    @property
    def confidence(self) -> list[float]:
        """The drafter's probability of every token. Those still on a device are read in one transfer."""
        waiting = {node: value for node, value in enumerate(self.confidences) if not isinstance(value, float | int)}
        for node, number in zip(waiting, _numbers([*waiting.values()])):
            self.confidences[node] = number
        return cast("list[float]", self.confidences)

    def again(self, node: int) -> int:
        """Record that the same child was drawn once more."""
        self.order.append(node)
        return node

    def blend(self, tokens: list[int], weights: list[float], parent: int = ROOT) -> int:
        """Append a node that represents several tokens; `tokens` lists it under the one with the largest weight."""
        node = self.add(max(zip(weights, tokens))[1], parent)
        self.blends[node] = (tokens, weights)
        return node

    def children(self, node: int) -> list[int]:
        """Children of a node in the order they were drawn, repeats included."""
        return [child for child in self.order if self.parents[child] == node]

    def families(self) -> dict[int, list[int]]:
        """`children` of every node that has some."""
        found: dict[int, list[int]] = {}
        for child in self.order:
            found.setdefault(self.parents[child], []).append(child)
        return found

    def follow(self, tokens: list[int], count: int) -> int:
        """The node that `tokens`, or as many of them as the tree has, lead to, among its first `count` nodes.

        Nodes that represent several tokens are not among them.
        """
        node = ROOT
        for token in tokens:
            child = next((c for c in self.children(node) if c < count and self.tokens[c] == token), None)
            if child is None or child in self.blends:
                break
            node = child
        return node

    def only(self, nodes: list[int]) -> TokenTree:
        """The subtree of these nodes, renumbered. They are ascending, and the parent of each is among them."""
        new = {old: i for i, old in enumerate(nodes)} | {ROOT: ROOT}
        subtree = TokenTree(self.source, self.drawn)
        for node in nodes:
            subtree.add(self.tokens[node], new[self.parents[node]], self.q[node], self.confidences[node])
        return subtree

    def path(self, node: int) -> list[int]:
        """Nodes from the child of the root down to `node`; empty for the root."""
        return path_to(node, self.parents)

    def prefix(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        return [self.tokens[i] for i in self.path(node)]

    def depth(self) -> int:
        """Length of the longest path from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return max(depths, default=0)

    def draft(self) -> Draft:
        """The event that shows this tree."""
        return Draft(
            tokens=list(self.tokens),
            parents=list(self.parents),
            q=list(self.confidence),
            source=self.source,
            drawn=self.drawn,
        )


def _numbers(scalars: list[torch.Tensor]) -> list[float]:
    """The values of tensors without dimensions, in one transfer."""
    if not scalars:
        return []
    import torch  # late: a tree of plain numbers needs none
    return torch.stack(scalars).tolist()


def chain(tokens: list[int], source: str) -> TokenTree:
    """A tree without branches whose tokens have confidence 1."""
    tree = TokenTree(source=source)
    for token in tokens:
        tree.add(token, len(tree) - 1)
    return tree


def merged(texts: list[list[int]], source: str) -> tuple[TokenTree, list[list[int]]]:
    """Texts as one tree that stores shared prefixes once, and the nodes of each text, the root first."""
    tree, paths = TokenTree(source), []
    known: dict[tuple[int, int], int] = {}  # nodes by parent and token
    for text in texts:
        paths.append([ROOT])
        for token in text:
            place = (paths[-1][-1], token)
            known[place] = known[place] if place in known else tree.add(token, place[0])
            paths[-1].append(known[place])
    return tree, paths
