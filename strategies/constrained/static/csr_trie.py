"""A trie as a sparse matrix: the next tokens are gathered for all beams at once, and no step depends on the number of
items.

States are numbers. 0 is the root and the state after the last token of an item; v + 1 is the prefix that is token v
alone; longer prefixes are numbered from V + 1 on. The first token is looked up in a dense mask, the others in rows of
(token, state) pairs, whose offsets are in indptr. Su et al. 2026, arXiv 2602.22647, with one dense layer and items of
any length.
"""
from __future__ import annotations

import torch
from torch import Tensor

ROOT = 0
PAD = -1  # after an item that is shorter than the longest


class CsrTrie:
    """Items over V tokens. `indptr` [states + 1] and `packed` [edges + widest, 2] are the matrix, `first` [V] the
    tokens that begin an item, `widest[t]` the most tokens that follow a prefix of t."""

    def __init__(self, items: list[list[int]], vocabulary: int):
        """Raises ValueError if there is no item, or one is a prefix of another, whose end would be ambiguous."""
        rows = _sorted_rows(items)
        self.vocabulary, self.length = vocabulary, rows.shape[1]
        new, last = _nodes(rows)
        numbers = _number(rows, new, last, vocabulary)
        edges = [_edges(rows, new, numbers, depth) for depth in range(1, self.length)]
        parents, pairs = (
            (torch.cat(column) for column in zip(*edges))
            if edges
            else (torch.zeros(0, dtype=torch.long), torch.zeros(0, 2, dtype=torch.long))
        )
        states = int(numbers.max()) + 1 if len(numbers) else 1
        counts = torch.bincount(parents, minlength=max(states, vocabulary + 1))
        self.indptr = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        self.widest = [
            len(rows[:, 0].unique()),
            *(int(torch.bincount(edge[0]).max()) if len(edge[0]) else 0 for edge in edges),
        ]
        # so that reading past the end is harmless
        padding = torch.tensor([[vocabulary, ROOT]]).expand(max(self.widest), 2)
        self.packed = torch.cat([pairs, padding])
        self.first = torch.zeros(vocabulary, dtype=torch.bool)
        self.first[rows[:, 0]] = True

    def to(self, device: torch.device) -> CsrTrie:
        self.indptr, self.packed, self.first = (part.to(device) for part in (self.indptr, self.packed, self.first))
        return self

    @property
    def edges(self) -> int:
        return int(self.indptr[-1])

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.indptr, self.packed, self.first))

    def following(self, states: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens that may follow prefixes of `depth` tokens in these states [n], the states they lead to, and which of
        them are no padding, [n, k].
        """
        if depth == 0:
            tokens = torch.arange(self.vocabulary, device=states.device).expand(len(states), -1)
            return tokens, tokens + 1, self.first.expand(len(states), -1)
        slots = torch.arange(self.widest[depth], device=states.device)
        begin, count = self.indptr[states], self.indptr[states + 1] - self.indptr[states]
        found = self.packed[begin[:, None] + slots]
        return found[..., 0], found[..., 1], slots < count[:, None]

    def complete(self, state: int) -> bool:
        """Whether an item ends here."""
        return state == ROOT or bool(self.indptr[state] == self.indptr[state + 1])


def _sorted_rows(items: list[list[int]]) -> Tensor:
    """Different items in lexicographic order, [N, longest]."""
    if not items or not all(items):
        raise ValueError("an item has no tokens")
    longest = max(map(len, items))
    rows = torch.tensor([[*item, *[PAD] * (longest - len(item))] for item in items]).unique(dim=0)
    begins = (rows[:-1] == rows[1:]) | (rows[:-1] == PAD)
    if bool(begins.all(1).any()):
        raise ValueError("an item begins another")
    return rows


def _nodes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in which the prefix that ends at a column first occurs, and those whose last token is there, [N, L].
    """
    differs = torch.ones(rows.shape, dtype=torch.bool)
    differs[1:] = (rows[1:] != rows[:-1]).cummax(1).values
    after = torch.cat([rows[:, 1:], torch.full((len(rows), 1), PAD)], 1)
    return differs & (rows != PAD), (rows != PAD) & (after == PAD)


def _number(rows: Tensor, new: Tensor, last: Tensor, vocabulary: int) -> Tensor:
    """State of each row after each of its tokens, [N, L]; ROOT after the last."""
    inner = new & ~last
    inner[:, 0] = False
    order = inner.T.flatten().cumsum(0).reshape(inner.T.shape).T  # by depth, then by row
    numbers = (order * inner).cummax(0).values + vocabulary
    numbers[:, 0] = rows[:, 0] + 1
    numbers[:, 1:][last[:, 1:] | (rows[:, 1:] == PAD)] = ROOT
    return numbers


def _edges(rows: Tensor, new: Tensor, numbers: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Parents [E], and (token, child) pairs [E, 2], of the tokens at a depth, ordered by parent and token."""
    chosen = new[:, depth]
    return numbers[chosen, depth - 1], torch.stack([rows[chosen, depth], numbers[chosen, depth]], 1)
