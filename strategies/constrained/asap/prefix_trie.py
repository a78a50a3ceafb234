"""What samples under a grammar teach: how likely free writing is to stay legal after each prefix they passed.

Of a prefix that was never read the trie believes the best, that everything after it is legal. Once its row is known,
its chance is the sum over legal tokens v of P(v | prefix) times the chance after v, and the better knowledge goes up to
the root once a sample has ended. Chances are therefore upper bounds, and they only fall. All of them are kept as
logarithms: the chance of a long text leaves the range of numbers. After Park et al. 2024, arXiv 2405.21047.
"""
from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

ROOT = 0
NEVER = float("-inf")  # log of 0
MOST = 100_000  # prefixes a trie remembers; beyond them it goes on believing the best


class PrefixTrie:
    """Nodes are prefixes that were drawn, ROOT the empty one. Node i adds tokens[i] to node parents[i].

    chances[i] is the log-probability that free writing after node i ends in a legal text. Legal tokens that were never
    drawn have no node; `unseen[i]` is the log of their mass together, None where the row after node i was never read.
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
        """log(P(v) times the chance after v) for every token, [V]; `legal` [V] is log P(v), -inf where v is not
        allowed.
        """
        weights, below = legal.clone(), self._below(node)
        if below:
            chances = torch.tensor([self.chances[child] for child in below.values()], dtype=legal.dtype)
            weights[list(below)] += chances
        return weights

    def descend(self, node: int | None, legal: Tensor, token: int) -> int | None:
        """Learn the row after a prefix and step to the token drawn from it; None beyond what the trie remembers.

        What it says of the prefixes before is left to `settle`, once for a whole sample: their chances do not matter
        to a sample that has passed them, and updating them at every token would take quadratic time.
        """
        if node is None:
            return None
        if token not in self.children[node] and len(self) < self.most:
            self._add(token, node, float(legal[token]))
        self.learn(node, legal)
        return self.children[node].get(token)

    def learn(self, node: int | None, legal: Tensor) -> None:
        """Note what the row after a prefix leaves legal."""
        if node is None:
            return
        drawn = torch.tensor(list(self.children[node]), dtype=torch.long)
        self.unseen[node] = float(legal.index_fill(0, drawn, NEVER).logsumexp(0))
        self._update(node)

    def settle(self, node: int) -> None:
        """Update the chances of all prefixes before a node, from the last one to the root."""
        while (node := self.parents[node]) >= ROOT:
            self._update(node)

    def _update(self, node: int) -> None:
        below = self.children[node].values()
        self.chances[node] = _log_sum([self.unseen[node], *(self.logp[child] + self.chances[child] for child in below)])

    def outline(self, count: int) -> tuple[list[int], list[int]]:
        """At most `count` nodes, level by level from the root, and where in this list the parent of each stands; -1 for
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
    """Log of a sum that is given by its logs; never above 0, for it is a probability."""
    return min(0.0, float(torch.tensor(logs, dtype=torch.float64).logsumexp(0)))
