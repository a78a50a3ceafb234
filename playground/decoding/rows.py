"""Rows: next-token logits after the committed text and after every node of a draft tree.

Each row passes through the same stages for target and draft: mask, penalties, temperature, truncation, sampling.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.row_records import RowReading, RowRecord
from playground.decoding.sampler_chain import HIDDEN_STATES, Histories, Stage
from playground.engine.host_copies import moved, on_device, read_together
from playground.engine.row_numbers import mask_numbers, processed_numbers, removing_stages, row_numbers
from playground.engine.sampling import REMOVED, entropy, first_largest, greedy, one_hot
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import EarlyExit
    from playground.decoding.checked_text import CheckedText
    from playground.decoding.sequence import Sequence as Text
    from playground.engine.forward_input import Expected
    from playground.events import Origin
    from playground.grammar.matcher import Matcher


@dataclass
class MaskedRows:
    """Rows of one stream, and what the grammar allows after each.

    Row i of the tensors belongs to tree node first + i. The root, node -1, is the end of the committed text.
    """

    stream: str
    raw: Tensor  # logits [n, V]
    sequence: Text
    tree: TokenTree
    first: int = ROOT
    # what samplers read in addition: logits [n, V] of other streams and early exits, HIDDEN_STATES [n, hidden_size]
    others: dict[str | EarlyExit, Tensor] = field(default_factory=dict)
    mask_seconds: float = 0.0  # time to compute the masks of these rows
    grammar_state: str = ""  # state of the grammar at the root
    masks: Tensor | None = None  # tokens the grammar allows after each node, bool [n, V]

    def __post_init__(self) -> None:
        self.chain, self.length = self.sequence.chain, len(self.sequence.tokens)
        self._host_masks: Tensor | None = None
        if self.chain.matcher and self.chain.computes_masks:  # now, because the matcher advances with every commit
            self.masks = self._masks(self.chain.matcher)

    @property
    def count(self) -> int:
        return self.raw.shape[0]  # faster than len of a tensor

    @property
    def committed(self) -> list[int]:
        """Tokens up to the root, prompt included."""
        return self.sequence.tokens[:self.length]

    def row(self, node: int) -> int:
        """Index of the row of a node. Raises IndexError if the node was not part of this forward."""
        row = node - self.first
        if not 0 <= row < self.count:
            raise IndexError(f"no row for node {node}: these are nodes {self.first} to {self._last}")
        return row

    def rows_of(self, nodes: list[int]) -> list[int]:
        """`row` of each of these nodes."""
        return [self.row(node) for node in nodes]

    def unread(self, node: int) -> bool:
        """Whether a node was added to the tree after this forward."""
        return node - self.first >= self.count

    @property
    def hidden(self) -> Tensor | None:
        """Input of the lm_head, [n, hidden_size]; None if no strategy of the lane needs hidden states."""
        return self.others.get(HIDDEN_STATES)

    def position(self, node: int) -> int:
        """Position in the sequence of the token that follows a node."""
        return self.length + len(self.tree.path(node))

    def _masks(self, matcher: Matcher | CheckedText) -> Tensor:
        """Tokens the grammar allows after each node, [n, V]."""
        self.grammar_state = matcher.state
        tokens, parents = self.tree.tokens[:self._last + 1], self.tree.parents[:self._last + 1]
        start = perf_counter()
        masks = matcher.masks_of_tree(tokens, parents)[self.first + 1 :, : self.raw.shape[1]]
        if self.chain.constraint and self.chain.constraint.narrows:
            masks = self.chain.constraint.narrow(
                masks, Histories(self.committed, self.tree, range(self.first, self._last + 1))
            )
        self.mask_seconds = perf_counter() - start
        if self.chain.masking and self.first == ROOT and not bool(masks[0].any()):
            raise Refusal(
                "The grammar allows no token of this model here, so the text cannot continue: loosen the grammar."
                + (self.chain.constraint.dead_end(list(self.committed)) if self.chain.constraint else ""),
                "constraint",
            )
        self._host_masks = masks  # what the host asks of them needs no wait for a GPU
        return moved(masks, self.raw.device)

    def dead_end(self, node: int) -> bool:
        """Whether the grammar allows no token after a node."""
        return self._host_masks is not None and not bool(self._host_masks[self.row(node)].any())

    def may_follow(self, token: int, node: int) -> bool:
        """Whether the grammar allows a token after a node."""
        return self._host_masks is None or bool(self._host_masks[self.row(node), token])

    def allows(self, token: int) -> bool:
        """Whether the constraint allows a token at the end of the text, without its mask. Call it before a commit."""
        if self.length != len(self.sequence.tokens):
            raise RuntimeError("the text has grown since these rows were computed: call it before a token is committed")
        matcher, constraint = self.chain.matcher, self.chain.constraint
        if matcher is None or constraint is None:
            return True
        return matcher.allows(token) and constraint.permits(self.committed, token, self.raw.shape[1])

    @property
    def _last(self) -> int:
        return self.first + self.count - 1


@dataclass
class Rows(MaskedRows):
    """Rows of one stream after each stage: masks, then the samplers; and what is read and recorded of them."""

    probes: Tensor | None = None  # logits [n, V] of the tree's probes, in order; None if this forward had none
    candidates: int = 0  # most probable tokens of each row that are recorded
    numbers: Callable[[Tensor, int], Tensor] = row_numbers  # how what is recorded of the rows is computed
    go_on: Callable[[Tensor], None] | None = None  # takes the next token [1], before the host knows it

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stages_by_row: dict[int, list[Stage]] = {}
        self._last_stages: tuple[list[int], list[Stage]] = [], []  # cache: the same rows are often read repeatedly
        self._staged = False  # whether the decoder added a stage
        self._records: dict[int, dict[int, RowRecord]] = {}  # by row and token, what was read with tokens
        self.foreseen: dict[int, int] = {}  # by node, the token that `pick` will choose, if it was read already
        self.taken: int | None = None  # the last token that the device knew first

    @cached_property
    def stages(self) -> list[Stage]:
        """Scores of all rows after each stage, the raw logits first."""
        if self._raw_is_final:
            return [Stage("raw", self.raw)]
        return self.chain.stages(self, Histories(self.committed, self.tree, range(self.first, self._last + 1)))

    def stages_of(self, rows: list[int]) -> list[Stage]:
        """The stages of these rows only: few rows of a large tree are read, and samplers cost time for each row."""
        if rows == list(range(self.count)):
            return self.stages
        if self._last_stages[0] != rows:
            self._last_stages = list(rows), self._stages_of(rows)
        return self._last_stages[1]

    def _stages_of(self, rows: list[int]) -> list[Stage]:
        if self._raw_is_final or "stages" in self.__dict__ or self.count == 1:
            index = self.index(rows)
            return [stage._replace(scores=stage.scores[index]) for stage in self.stages]
        self._compute_stages([row for row in dict.fromkeys(rows) if row not in self._stages_by_row])
        found = [self._stages_by_row[row] for row in rows]
        return [
            stage._replace(scores=concat([stages[i].scores for stages in found])) for i, stage in enumerate(found[0])
        ]

    def _compute_stages(self, rows: list[int]) -> None:
        if not rows:
            return
        histories = Histories(self.committed, self.tree, [self.first + row for row in rows])
        stages = self.chain.stages(self._part(rows), histories)
        for i, row in enumerate(rows):
            self._stages_by_row[row] = [stage._replace(scores=stage.scores[i:i + 1]) for stage in stages]

    def add_stage(self, name: str, scores: Tensor) -> None:
        """Append a stage with scores [n, V] that the decoder computed; call it before a token is sampled."""
        self.stages.append(Stage(name, scores.to(self.raw)))
        self._staged, self._last_stages = True, ([], [])

    @property
    def scores(self) -> Tensor:
        """Final scores, [n, V]."""
        return self.stages[-1].scores

    def scores_of(self, nodes: list[int]) -> Tensor:
        """The scores [n, V] after nodes."""
        return self.scores[self.index(self.rows_of(nodes))]

    @cached_property
    def logp(self) -> Tensor:
        """The model's own log-probabilities, before masks and samplers, [n, V]."""
        return self.raw.log_softmax(-1)

    def allowed_logp(self, node: int = ROOT) -> Tensor:
        """Log-probabilities after samplers, [V], of what may follow a node: -inf where the constraint forbids a token.

        They are normalised before the mask, so a sum over a text is the log-probability of that text. Samplers that
        remove all allowed tokens, as a minimum length does with the end, see the mask first, as in other decoders.
        """
        row = self.row(node)
        if self.masks is None:
            return self.stages_of([row])[-1].scores[0].log_softmax(-1)
        part = self._part([row])
        part.masks = None
        scores = self.chain.stages(part, Histories(self.committed, self.tree, [node]))[-1].scores[0]
        allowed = scores.log_softmax(-1).masked_fill(~self.masks[row], REMOVED)
        if not self.chain.samplers or bool((allowed > REMOVED).any()):
            return allowed
        return self.stages_of([row])[-1].scores[0].log_softmax(-1)

    def _part(self, rows: list[int]) -> Rows:
        """What the chain reads of some rows."""
        part, index = copy(self), self.index(rows)
        part.raw, part.others = self.raw[index], {name: raw[index] for name, raw in self.others.items()}
        part.masks = None if self.masks is None else self.masks[index]
        return part

    def index(self, rows: list[int]) -> slice | Tensor:
        """An index of these rows, on the device."""
        index = row_index(rows)
        return index if isinstance(index, slice) else on_device(index, self.raw.device, torch.long)

    @cached_property
    def p(self) -> Tensor:
        """Distributions that tokens are sampled from, [n, V]; one-hot if no sampler draws."""
        return self._distributions(self.scores)

    def distribution(self, node: int = ROOT) -> Tensor:
        """The row of `p` after one node, [V]; cheaper than all of `p` for a large tree."""
        if self._raw_is_final and not self.chain.draws:
            return one_hot(self.best(node), self.raw[self.row(node)])
        return self._distributions(self.stages_of([self.row(node)])[-1].scores)[0]

    def _distributions(self, scores: Tensor) -> Tensor:
        return (scores if self.chain.draws else greedy(scores)).softmax(-1).nan_to_num()

    def best(self, node: int = ROOT) -> int:
        """The token with the largest final score."""
        if self.read_together:
            return self.readings[self.row(node)].best if self.candidates else self._argmax[self.row(node)]
        if self._raw_is_final:
            return int(first_largest(self.raw[self.row(node)]))
        return int(first_largest(self.stages_of([self.row(node)])[-1].scores))

    @property
    def _raw_is_final(self) -> bool:
        """Whether the final scores are the raw logits."""
        return not (self.chain.samplers or self.others or self._staged) and (
            self.masks is None or not self.chain.masking
        )

    @cached_property
    def _argmax(self) -> list[int]:
        return first_largest(self.raw)[:, 0].tolist()

    @property
    def read_together(self) -> bool:
        """Whether the choice of a token and what is recorded of its row are read in one transfer, `readings`."""
        return self._raw_is_final and not self.raw.is_cpu

    @cached_property
    def readings(self) -> list[RowReading]:
        """The most probable token of every row, and what is recorded of the model's distribution."""
        count = min(self.candidates, self.raw.shape[-1])
        return [
            RowReading(int(best), entropy, [int(token) for token in rest[:count]], rest[count:-count], rest[-count:])
            for entropy, best, *rest in self.numbers(self.raw, count).tolist()
        ]

    def read_with(self, rows: list[int], chosen: Tensor, *others: Tensor) -> list[list[list[float]]]:
        """Read tensors [n, k] that belong to these rows, and what is recorded of the rows with it.

        `chosen` are the tokens [n, m] of which some may be chosen. Returns the columns of each row, those of `chosen`
        first.
        """
        if not self.candidates:
            return read_together(chosen.to(self.raw.dtype), *others)
        read = _read(self, rows, chosen, self.candidates, others)
        self._records |= {row: {record.token: record for record in records} for row, (records, _) in zip(rows, read)}
        return [[[record.token for record in records], *extra] for records, extra in read]

    def record_of(self, row: int, token: int) -> RowRecord | None:
        """What the host read of a row when it read the token that was chosen from it; None if it did not."""
        if row in self._records:
            return self._records[row].get(token)
        if self.masks is not None or not (self.candidates and self.read_together):
            return None
        best, entropy, ids, p, logp = self.readings[row]
        if token not in ids:
            return None
        return RowRecord(token, entropy, entropy, logp[ids.index(token)], ids, p, p, [None] * len(ids))

    def went_on(self, token: int) -> Expected:
        """Whether the text went on after the last row with its most probable token, or with the one that was drawn."""
        if "readings" in self.__dict__ and self.readings[-1].best == token:
            return "best"
        return "drawn" if token == self.taken else ""

    def entropy(self, node: int = ROOT) -> float:
        """Entropy in nats of the model's own distribution after a node, before masks and samplers."""
        return float(entropy(self.raw[self.row(node)]))


@dataclass(frozen=True)
class TokenChoice:
    """A token chosen from a row, to be committed by the sequence of the row, or by another one with the same tokens."""

    token: int
    rows: Rows
    node: int = ROOT
    origin: Origin = "sampled"
    by: Text | None = None

    @property
    def sequence(self) -> Text:
        return self.by or self.rows.sequence

    @property
    def p(self) -> Tensor:
        """The distribution it was chosen from, [V]."""
        return self.rows.distribution(self.node)


def read_records(rows: Rows, nodes: list[int], tokens: list[int], count: int) -> list[RowRecord]:
    """What is recorded of the rows after nodes from which these tokens were chosen, with `count` candidates.

    It was read together with the tokens, or is read now in one transfer.
    """
    indices = rows.rows_of(nodes)
    if rows.raw.is_cpu:
        return [record for (record,), _ in _read(rows, indices, torch.tensor(tokens)[:, None], count)]
    known = [record for row, token in zip(indices, tokens) if (record := rows.record_of(row, token)) is not None]
    if len(known) == len(tokens):
        return known
    chosen = on_device(tokens, rows.raw.device, torch.long)[:, None]
    return [record for (record,), _ in _read(rows, indices, chosen, count)]


def _read(
    rows: Rows, indices: list[int], chosen: Tensor, count: int, others: Sequence[Tensor] = ()
) -> list[tuple[list[RowRecord], list[list[float]]]]:
    """Of each of these rows the records, one for each of its tokens `chosen` [n, m], and the columns of other tensors
    [n, k], in one transfer.
    """
    stages = rows.stages_of(indices)
    names, scores = [None, *(stage.name for stage in stages[1:])], [stage.scores for stage in stages]
    parts = _parts(rows, indices, scores, chosen, min(count, rows.raw.shape[1]))
    found = []
    for row in read_together(*parts, *others):
        (entropy, final_entropy), tokens, logprobs, ids, p, final_p, removed, *mask = row[:len(parts)]
        first = RowRecord(0, entropy, final_entropy, 0.0, list(map(int, ids)), p, final_p,
                          [names[int(number)] for number in removed], mask)
        records = [first._replace(token=int(token), logprob=logprob) for token, logprob in zip(tokens, logprobs)]
        found.append((records, row[len(parts):]))
    return found


def _parts(rows: Rows, indices: list[int], scores: list[Tensor], chosen: Tensor, count: int) -> list[Tensor]:
    """What `_read` transfers of rows with these scores [n, V] after each stage."""
    raw, final = scores[0], scores[-1]
    entropy, _, found, p, _ = rows.numbers(raw, count).split([1, 1, count, count, count], 1)
    ids, logp, removed = found.long(), raw.log_softmax(-1), torch.zeros_like(found)
    final_entropy, final_p = entropy, p
    if final.data_ptr() != raw.data_ptr():  # otherwise no sampler changed the scores
        final_entropy, final_p = processed_numbers(final, ids)
        removed = removing_stages(scores, ids)
    own = logp.gather(-1, chosen.clamp(max=raw.shape[1] - 1))
    facts = torch.cat([entropy, final_entropy], 1)
    masks = [] if rows.masks is None else mask_numbers(logp.exp(), rows.masks[rows.index(indices)], rows.chain.end_ids)
    return [facts, chosen, own, found, p, final_p, removed, *masks]


def row_index(rows: list[int]) -> slice | list[int]:
    """An index of these rows: a slice if they are consecutive, which avoids a copy."""
    return slice(rows[0], rows[-1] + 1) if rows and rows == list(range(rows[0], rows[-1] + 1)) else rows


def concat(rows: list[Tensor]) -> Tensor:
    """Concatenate rows [a, V], [b, V], ..., without a copy if there is only one tensor."""
    return rows[0] if len(rows) == 1 else torch.cat(rows)
