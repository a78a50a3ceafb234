"""Learns from samples under a grammar how probable a valid text is after each of their prefixes.

For a prefix that was never read the trie assumes the upper bound 1. Once its row is known, its probability is the sum
over allowed tokens v of P(v | prefix) times the probability after v, and the better estimate is propagated to the root
once a sample has ended. All are therefore upper bounds that never increase. They are stored as logarithms, since the
probability of a long text underflows. After Park et al. 2024, arXiv 2405.21047.
"""
from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

ROOT = 0
NEVER = float("-inf")  # log of 0
MOST = 100_000  # prefixes of a trie; for others it assumes the upper bound


class PrefixTrie:
    """Nodes are sampled prefixes, ROOT the empty one. Node i adds tokens[i] to node parents[i].

    chances[i] is the log-probability that unconstrained sampling after node i gives a valid text. Allowed tokens that
    were never sampled have no node; `unseen[i]` is the log of their total mass, None if the row after node i is
    unknown.
    """

    def __init__(self, most: int = MOST):
        self.most = most
        self.tokens, self.parents, self.children = [-1], [-1], [{}]
        self.logp = [0.0]  # of the token, given the prefix before it
        self.unseen: list[float | None] = [None]
        self.chances = [0.0]

    def __len__(self) -> int:
        return len(self.tokens)

    def weigh(self, node: int | None, legal: Tensor) -> Tensor:
        """log(P(v) times the probability after v) for every token, [V]; `legal` [V] is log P(v), -inf if v is not
        allowed.
        """
        weights, below = legal.clone(), self._below(node)
        if below:
            chances = torch.tensor([self.chances[child] for child in below.values()], dtype=legal.dtype)
            weights[list(below)] += chances
        return weights

    def descend(self, node: int | None, legal: Tensor, token: int) -> int | None:
        """Learn the row after a prefix and step to the token sampled from it; None beyond the limit of the trie.

        Earlier prefixes are updated by `settle`, once per sample: their probabilities do not matter to a sample beyond
        them, and updating them at every token would take quadratic time.
        """
        if node is None:
            return None
        if token not in self.children[node] and len(self) < self.most:
            self._add(token, node, float(legal[token]))
        self.learn(node, legal)
        return self.children[node].get(token)

    def learn(self, node: int | None, legal: Tensor) -> None:
        """Record the allowed mass of the row after a prefix."""
        if node is None:
            return
        drawn = torch.tensor(list(self.children[node]), dtype=torch.long)
        self.unseen[node] = float(legal.index_fill(0, drawn, NEVER).logsumexp(0))
        self._update(node)

    def settle(self, node: int) -> None:
        """Update the probabilities of all prefixes before a node, from the last one to the root."""
        while (node := self.parents[node]) >= ROOT:
            self._update(node)

    def _update(self, node: int) -> None:
        below = self.children[node].values()
        self.chances[node] = _log_sum([self.unseen[node], *(self.logp[child] + self.chances[child] for child in below)])

    def outline(self, count: int) -> tuple[list[int], list[int]]:
        """At most `count` nodes, level by level from the root, and the index of each one's parent in this list; -1 for
        the root.
        """
        found = [ROOT]
        for node in found:
            if len(found) >= count:
                break
            found += self.children[node].values()
        nodes = found[:count]
        return nodes, [-1, *(nodes.index(self.parents[node]) for node in nodes[1:])]

    def digest(self) -> str:
        return blake2b(repr((self.tokens, self.parents, self.logp, self.unseen)).encode(), digest_size=8).hexdigest()

    def _below(self, node: int | None) -> dict[int, int]:
        return {} if node is None else self.children[node]

    def _add(self, token: int, parent: int, logp: float) -> None:
        self.children[parent][token] = len(self)
        for column, entry in (
            (self.tokens, token),
            (self.parents, parent),
            (self.children, {}),
            (self.logp, logp),
            (self.unseen, None),
            (self.chances, 0.0),
        ):
            column.append(entry)


def _log_sum(logs: list[float]) -> float:
    """Log of a sum of exponentials; at most 0, since it is a probability."""
    return min(0.0, float(torch.tensor(logs, dtype=torch.float64).logsumexp(0)))
