"""Rows: what a model thinks comes next, after the committed text and after every node of a guessed tree.

A row goes one way: raw - mask - penalties - temperature - truncation - draw. Target and draft rows go the same way.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.engine.sampling import REMOVED, entropy, greedy
from playground.errors import Refusal
from playground.parts.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from playground.engine.grammar import Matcher
    from playground.strategy import Sampler


@dataclass
class Chain:
    """What every row of a lane passes through before a token is drawn."""

    samplers: list[Sampler] = field(default_factory=list)
    matcher: Matcher | None = None
    end_ids: frozenset[int] = frozenset()

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn by chance; argmax otherwise."""
        return any(sampler.draws for sampler in self.samplers)

    def stages(self, raw: Tensor, masks: Tensor | None, histories: Sequence[list[int]]) -> list[tuple[str, Tensor]]:
        """Scores after each stage, the raw ones first, [n, V] each."""
        stages = [("raw", raw)]
        if masks is not None:
            stages.append(("mask", raw.masked_fill(~masks, REMOVED)))
        for sampler in self.samplers:
            stages.append((sampler.name, sampler.apply(stages[-1][1], histories)))
        return stages


class Histories(Sequence):
    """Tokens before each row, built only when a sampler asks."""

    def __init__(self, committed: list[int], tree: TokenTree, nodes: range):
        self.committed, self.tree, self.nodes = committed, tree, nodes

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, row: int) -> list[int]:
        return self.committed + self.tree.prefix(self.nodes[row])


@dataclass
class Rows:
    """Rows of one stream. Row i of the tensors belongs to tree node first + i; the root, node -1, is the end of the committed text."""

    stream: str
    raw: Tensor  # logits [n, V]
    chain: Chain
    committed: list[int]
    tree: TokenTree
    first: int = ROOT
    mask_seconds: float = 0.0  # time the grammar took for these rows
    grammar_state: str = ""  # where the grammar stood at the root
    masks: Tensor | None = None  # tokens the grammar allows after each node, [n, V]

    def __post_init__(self) -> None:
        if self.chain.matcher:  # now: the matcher moves on when tokens are kept
            self.masks = self._masks()

    def row(self, node: int) -> int:
        """Index of a node's row; raises where the node was not part of this forward."""
        row = node - self.first
        if not 0 <= row < len(self.raw):
            raise IndexError(f"no row for node {node}: these are nodes {self.first} to {self.first + len(self.raw) - 1}")
        return row

    def after(self, node: int) -> Tensor | None:
        """The raw row of one node, [1, V]; None where it was not part of this forward."""
        return self.raw[node - self.first:node - self.first + 1] if node >= self.first else None

    def position(self, node: int) -> int:
        """Position in the sequence of the token this row is about."""
        return len(self.committed) + len(self.tree.path(node))

    def _masks(self) -> Tensor:
        """Tokens the grammar allows after each node, [n, V]."""
        self.grammar_state = self.chain.matcher.state
        tokens, parents = self.tree.tokens[:self._last + 1], self.tree.parents[:self._last + 1]
        start = perf_counter()
        masks = self.chain.matcher.masks_of_tree(tokens, parents)[self.first + 1:, :self.raw.shape[1]].to(self.raw.device)
        self.mask_seconds = perf_counter() - start
        if self.first == ROOT and not bool(masks[0].any()):
            raise Refusal("The grammar allows no token here: nothing this model can write continues the text legally. Loosen the grammar.", "constraint")
        return masks

    @property
    def _last(self) -> int:
        return self.first + len(self.raw) - 1

    @cached_property
    def stages(self) -> list[tuple[str, Tensor]]:
        nodes = range(self.first, self._last + 1)
        return self.chain.stages(self.raw, self.masks, Histories(self.committed, self.tree, nodes))

    @property
    def scores(self) -> Tensor:
        """Final scores, [n, V]."""
        return self.stages[-1][1]

    @cached_property
    def p(self) -> Tensor:
        """Distributions tokens are drawn from, [n, V]; all mass on the largest score where nothing is drawn by chance."""
        return (self.scores if self.chain.draws else greedy(self.scores)).softmax(-1).nan_to_num()

    def best(self, node: int = ROOT) -> int:
        """The token of the largest final score."""
        return int(self.scores[self.row(node)].argmax())

    def entropy(self, node: int = ROOT) -> float:
        """Entropy in nats of the model's own row, before masks and samplers."""
        return float(entropy(self.raw[self.row(node)]))

    def finals(self, rows: list[int], tokens: Tensor) -> Tensor:
        """Probability that tokens [n, k] of the given rows are drawn with, [n, k]."""
        if self.chain.draws:
            return self.p[rows].gather(-1, tokens)
        return (tokens == self.scores[rows].argmax(-1, keepdim=True)).float()

    def falls(self, rows: list[int], tokens: Tensor) -> list[list[str | None]]:
        """For tokens [n, k] of the given rows: the stage that removed each, None where none did."""
        fell: list[list[str | None]] = [[None] * tokens.shape[1] for _ in rows]
        for name, scores in reversed(self.stages[1:]):  # the first stage that removed a token is written last
            for row, column in (scores[rows].gather(-1, tokens) == REMOVED).nonzero().tolist():
                fell[row][column] = name
        return fell


@dataclass(frozen=True)
class Choice:
    """A token chosen from a row, to be kept."""

    token: int
    rows: Rows
    node: int = ROOT
    origin: str = "sampled"

    @property
    def p(self) -> Tensor:
        """Distribution it was chosen from, [V]."""
        return self.rows.p[self.rows.row(self.node)]


def concat(rows: list[Tensor]) -> Tensor:
    """Rows [a, V] and [b, V] on one another, without a copy where there is only one."""
    return rows[0] if len(rows) == 1 else torch.cat(rows)
