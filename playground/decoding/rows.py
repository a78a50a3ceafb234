"""Rows: what a model thinks comes next, after the committed text and after every node of a guessed tree.

A row goes one way: raw - mask - penalties - temperature - truncation - draw. Target and draft rows go the same way.
"""
from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.sampler_chain import HIDDEN, Histories, Stage
from playground.engine.sampling import REMOVED, certain, entropy, greedy
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import EarlyExit
    from playground.decoding.sequence import Sequence as Text
    from playground.events import Event


@dataclass
class Rows:
    """Rows of one stream. Row i of the tensors belongs to tree node first + i; the root, node -1, is the end of the
    committed text.
    """

    stream: str
    raw: Tensor  # logits [n, V]
    sequence: Text
    tree: TokenTree
    first: int = ROOT
    # raw rows [n, V] that samplers read besides, and HIDDEN [n, width]
    others: dict[str | EarlyExit, Tensor] = field(default_factory=dict)
    mask_seconds: float = 0.0  # time the grammar took for these rows
    grammar_state: str = ""  # where the grammar stood at the root
    masks: Tensor | None = None  # tokens the grammar allows after each node, [n, V]

    def __post_init__(self) -> None:
        self.chain, self.length = self.sequence.chain, len(self.sequence.tokens)
        self._looked_at: dict[int, list[Stage]] = {}  # stages of single rows
        # the same rows are often asked for several times in a row
        self._last_asked: tuple[list[int], list[Stage]] = [], []
        self._decided = False  # by the decoder, whatever the model says
        if self.chain.matcher:  # now: the matcher moves on when tokens are kept
            self.masks = self._masks()

    @property
    def count(self) -> int:
        return self.raw.shape[0]  # len of a tensor goes a long way round

    @property
    def committed(self) -> list[int]:
        """The tokens before the root."""
        return self.sequence.tokens[:self.length]

    def row(self, node: int) -> int:
        """Index of a node's row; raises where the node was not part of this forward."""
        row = node - self.first
        if not 0 <= row < self.count:
            raise IndexError(f"no row for node {node}: these are nodes {self.first} to {self._last}")
        return row

    def unread(self, node: int) -> bool:
        """Whether a node was added to the tree after this forward."""
        return node - self.first >= self.count

    @property
    def hidden(self) -> Tensor | None:
        """What the model's head reads in each row, [n, width]; None where no strategy of the lane needs hidden states.
        """
        return self.others.get(HIDDEN)

    def position(self, node: int) -> int:
        """Position in the sequence of the token this row is about."""
        return self.length + len(self.tree.path(node))

    def _masks(self) -> Tensor:
        """Tokens the grammar allows after each node, [n, V]."""
        self.grammar_state = self.chain.matcher.state
        tokens, parents = self.tree.tokens[:self._last + 1], self.tree.parents[:self._last + 1]
        start = perf_counter()
        masks = self.chain.matcher.masks_of_tree(tokens, parents)[self.first + 1 :, : self.raw.shape[1]].to(
            self.raw.device
        )
        if self.chain.constraint and self.chain.constraint.narrows:
            masks = self.chain.constraint.narrow(
                masks, Histories(self.committed, self.tree, range(self.first, self._last + 1))
            )
        self.mask_seconds = perf_counter() - start
        if self.chain.masking and self.first == ROOT and not bool(masks[0].any()):
            raise Refusal(
                "The grammar allows no token here: nothing this model can write continues the text legally. Loosen the grammar.",
                "constraint",
            )
        return masks

    @property
    def _last(self) -> int:
        return self.first + self.count - 1

    @cached_property
    def stages(self) -> list[Stage]:
        return self.chain.stages(self, Histories(self.committed, self.tree, range(self.first, self._last + 1)))

    def stages_of(self, rows: list[int]) -> list[Stage]:
        """The stages of some rows alone. Of a large tree few rows are ever looked at, and samplers cost by the row."""
        if rows == list(range(self.count)):
            return self.stages
        if self._last_asked[0] != rows:
            self._last_asked = list(rows), self._stages_of(rows)
        return self._last_asked[1]

    def _stages_of(self, rows: list[int]) -> list[Stage]:
        if self._plain or "stages" in self.__dict__ or self.count == 1:
            some = where(rows)
            return [stage._replace(scores=stage.scores[some]) for stage in self.stages]
        self._look_at([row for row in dict.fromkeys(rows) if row not in self._looked_at])
        found = [self._looked_at[row] for row in rows]
        return [
            stage._replace(scores=concat([stages[i].scores for stages in found])) for i, stage in enumerate(found[0])
        ]

    def _look_at(self, rows: list[int]) -> None:
        if not rows:
            return
        part, some = copy(self), where(rows)
        part.raw, part.others = self.raw[some], {name: raw[some] for name, raw in self.others.items()}
        part.masks = None if self.masks is None else self.masks[some]
        stages = self.chain.stages(part, Histories(self.committed, self.tree, [self.first + row for row in rows]))
        for i, row in enumerate(rows):
            self._looked_at[row] = [stage._replace(scores=stage.scores[i:i + 1]) for stage in stages]

    def decide(self, name: str, scores: Tensor) -> None:
        """A decoder that reckons the law itself says so: scores [n, V] after a stage of its own, before anything is
        drawn.
        """
        self.stages.append(Stage(name, scores.to(self.raw)))
        self._decided, self._last_asked = True, ([], [])

    @property
    def scores(self) -> Tensor:
        """Final scores, [n, V]."""
        return self.stages[-1].scores

    @cached_property
    def logp(self) -> Tensor:
        """The model's own log-probabilities, before masks and samplers, [n, V]."""
        return self.raw.log_softmax(-1)

    @cached_property
    def p(self) -> Tensor:
        """Distributions tokens are drawn from, [n, V]; all mass on the largest score where nothing is drawn by chance.
        """
        return self._chances(self.scores)

    def chances(self, node: int = ROOT) -> Tensor:
        """The row of `p` after one node, [V]; in a large tree cheaper than all of them."""
        if self._plain and not self.chain.draws:
            return certain(self.best(node), self.raw[self.row(node)])
        return self._chances(self.stages_of([self.row(node)])[-1].scores)[0]

    def _chances(self, scores: Tensor) -> Tensor:
        return (scores if self.chain.draws else greedy(scores)).softmax(-1).nan_to_num()

    def best(self, node: int = ROOT) -> int:
        """The token of the largest final score."""
        if self._plain:
            return self._bests[self.row(node)] if self.raw.is_cuda else int(self.raw[self.row(node)].argmax())
        return int(self.stages_of([self.row(node)])[-1].scores.argmax())

    @property
    def _plain(self) -> bool:
        """Whether final scores are the raw ones."""
        return not (self.chain.samplers or self.others or self._decided) and (
            self.masks is None or not self.chain.masking
        )

    @cached_property
    def _bests(self) -> list[int]:
        """Of all rows at once: a GPU is waited for a single time."""
        return self.raw.argmax(-1).tolist()

    def entropy(self, node: int = ROOT) -> float:
        """Entropy in nats of the model's own row, before masks and samplers."""
        return float(entropy(self.raw[self.row(node)]))

    def finals(self, rows: list[int], tokens: Tensor) -> Tensor:
        """Probability that tokens [n, k] of the given rows are drawn with, [n, k]."""
        scores = self.stages_of(rows)[-1].scores
        if self.chain.draws:
            return self._chances(scores).gather(-1, tokens)
        return (tokens == scores.argmax(-1, keepdim=True)).float()

    def falls(self, rows: list[int], tokens: Tensor) -> list[list[str | None]]:
        """For tokens [n, k] of the given rows: the stage that removed each, None where none did."""
        fell: list[list[str | None]] = [[None] * tokens.shape[1] for _ in rows]
        # the first stage that removed a token is written last
        for name, scores, _ in reversed(self.stages_of(rows)[1:]):
            for row, column in (scores.gather(-1, tokens) == REMOVED).nonzero().tolist():
                fell[row][column] = name
        return fell

    def kept(self, node: int, token: int, by: Text) -> Iterator[Event]:
        """Tell samplers that remember, or have something to show, which token a sequence kept after a node."""
        if self.chain.constraint and self.chain.constraint.explains:
            yield from self.chain.constraint.explain(self.committed + self.tree.prefix(node), token)
        if not self.chain.samplers:
            return
        # not the row's, where it takes another sequence's row
        own = {sampler.name: sampler for sampler in by.chain.samplers}
        row, position = self.row(node), self.position(node) - self.sequence.start
        for before, stage in pairwise(self.stages_of([row])):
            if stage.sampler is not None and stage.sampler.explains:
                yield from own[stage.name].explain(before.scores[0], self.committed + self.tree.prefix(node), token)
            if stage.sampler is None or not stage.sampler.observes:
                continue
            others = {name: raw[row] for name, raw in self.others.items()} if stage.sampler.stage == "mix" else {}
            yield from own[stage.name].observe({**others, self.stream: before.scores[0]}, token, position)


@dataclass(frozen=True)
class TokenChoice:
    """A token chosen from a row, to be kept: by the sequence the row belongs to, or by another that stands at the same
    place.
    """

    token: int
    rows: Rows
    node: int = ROOT
    origin: str = "sampled"
    by: Text | None = None

    @property
    def sequence(self) -> Text:
        return self.by or self.rows.sequence

    @property
    def p(self) -> Tensor:
        """Distribution it was chosen from, [V]."""
        return self.rows.chances(self.node)


def where(rows: list[int]) -> slice | list[int]:
    """An index of these rows; rows that follow one another are not copied."""
    return slice(rows[0], rows[-1] + 1) if rows and rows == list(range(rows[0], rows[-1] + 1)) else rows


def concat(rows: list[Tensor]) -> Tensor:
    """Rows [a, V] and [b, V] on one another, without a copy where there is only one."""
    return rows[0] if len(rows) == 1 else torch.cat(rows)
