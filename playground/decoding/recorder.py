"""Turns rows, committed tokens and caches into events.

A lane has one recorder. `Silent` records only the text; the benchmark uses it to measure the overhead of recording.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT
from playground.engine.host_copies import read_together
from playground.engine.row_numbers import CANDIDATES
from playground.engine.sampling import REMOVED, entropy_of, largest
from playground.events import Cache, Candidate, Commit, Event, Mask, Origin, Step, rounded, rounded_each
from playground.trace.cache_contents import holes, spans, with_targets, write_head, write_layers

if TYPE_CHECKING:
    from playground.decoding.rows import Rows
    from playground.decoding.sampler_chain import Stage
    from playground.engine.cache.freed_slots import FreedSlots
    from playground.engine.cache.kv_buffer import MergedTokens
    from playground.engine.cache.kv_cache import KVCache
    from playground.engine.text.tokens import Tokens

FAVOURITES = 5  # masked tokens that are listed


class CommittedToken(NamedTuple):
    """A token to commit, and the row it was chosen from; forced tokens have none."""

    token: int
    origin: Origin
    rows: Rows | None = None
    node: int = ROOT


class Settled(NamedTuple):
    """What a policy did to a cache."""

    freed: int = 0  # slots evicted, over layers and heads
    joined: list[MergedTokens | None] = []  # by layer, the slots merged into others; empty if no layer merged any


def combined(settled: list[Settled], positions_of: Callable[[int], Tensor]) -> Settled:
    """What a policy did in several steps; `positions_of` a layer are [1 or kv_heads, slots] after the last one."""
    joined = [each.joined for each in settled if each.joined]
    if len(joined) < 2:
        return Settled(sum(each.freed for each in settled), joined[0] if joined else [])
    layers = [_followed(list(filter(None, merges)), positions_of(layer)) for layer, merges in enumerate(zip(*joined))]
    return Settled(sum(each.freed for each in settled), layers)


def _followed(steps: list[MergedTokens], positions: Tensor) -> MergedTokens | None:
    """Merges of one layer in several steps, each with the slot that it has ended in; those evicted since are left out.
    """
    ends: dict[tuple[int, int], int] = {}
    for step in steps:
        moves = {(head, source): target for head, source, target in zip(*(column.tolist() for column in step))}
        ends = {slot: moves.get((slot[0], end), end) for slot, end in ends.items()} | moves
    live = [set(head) for head in positions.tolist()]
    kept = sorted((head, source, end) for (head, source), end in ends.items() if end in live[head % len(live)])
    return type(steps[0])(*(column.new_tensor(own) for column, own in zip(steps[0], zip(*kept)))) if kept else None


class RowNumbers(NamedTuple):
    """What is recorded of the row a token was chosen from, rounded."""

    entropy: float  # in nats, of the model's own distribution
    final_entropy: float  # after masks and samplers
    logprob: float  # of the token
    top: list[Candidate]
    mask: list[list[float]] = []  # columns of `_mask_parts`; empty without a grammar


@dataclass
class Recorder:
    """Events of committed tokens and of the target's cache."""

    tokens: Tokens
    top: int = CANDIDATES  # candidates recorded for each token

    def committed(self, committed: list[CommittedToken], start: int, text: str) -> list[Event]:
        """Events of new tokens: a Step, and with a grammar a Mask, for each that has a row, then the Commit."""
        events: list[Event] = []
        logprobs: list[float | None] = [None] * len(committed)
        with_rows = [(i, item) for i, item in enumerate(committed) if item.rows is not None]
        if with_rows:
            events, found = self._steps([item for _, item in with_rows], [start + i for i, _ in with_rows])
            for (i, _), logprob in zip(with_rows, found):
                logprobs[i] = logprob
        forced = [item.token for item in committed if item.rows is None]
        for mask in [event for event in events if isinstance(event, Mask)][-1:]:
            mask.forced = forced
        events.append(self._commit(committed, start, text, logprobs))
        return events

    def _commit(
        self, committed: list[CommittedToken], start: int, text: str, logprobs: list[float | None]
    ) -> Commit:
        ids, origins = [item.token for item in committed], [item.origin for item in committed]
        return Commit(start, ids, self.tokens.pieces(ids), text, logprobs, origins)

    def _steps(self, committed: list[CommittedToken], positions: list[int]) -> tuple[list[Event], list[float]]:
        """Steps and Masks, and log-probabilities. The tokens of one commit come from one forward and are batched."""
        rows = committed[0].rows
        indices, tokens = rows.rows_of([item.node for item in committed]), [item.token for item in committed]
        events: list[Event] = []
        numbers = self._already_read(rows, indices, tokens) or self._read(rows, indices, tokens)
        for token, position, row in zip(tokens, positions, numbers):
            events.append(Step(position, row.entropy, row.final_entropy, token, row.top, rows.stream))
            if row.mask:
                events.append(self._mask(rows, position, row.mask))
        return events, [row.logprob for row in numbers]

    def _already_read(self, rows: Rows, indices: list[int], tokens: list[int]) -> list[RowNumbers] | None:
        """Numbers that were read when the tokens were chosen; None if they were not, or not all of them."""
        if rows.raw.is_cpu or rows.masks is not None or not (rows.candidates and rows.read_together):
            return None
        found = [rows.readings[index] for index in indices]
        if any(token not in row.ids for token, row in zip(tokens, found)):
            return None
        return [
            RowNumbers(*rounded_each([row.entropy, row.entropy, row.logp[row.ids.index(token)]]),
                       self._candidates(row.ids, row.p, row.p, [None] * len(row.ids)))
            for token, row in zip(tokens, found)
        ]

    def _read(self, rows: Rows, indices: list[int], tokens: list[int]) -> list[RowNumbers]:
        """Numbers of these rows, in one transfer."""
        stages = rows.stages_of(indices)
        raw, final = stages[0].scores, stages[-1].scores
        logp = raw.log_softmax(-1)
        p = logp.exp()
        values, ids = largest(p, min(self.top, p.shape[-1]))
        entropies = entropy_of(p, raw)
        unchanged = final.data_ptr() == raw.data_ptr()  # no sampler changed the scores
        final_p, final_entropies = (p, entropies) if unchanged else _processed(final)
        chosen = torch.stack([logp[i, token] for i, token in enumerate(tokens)])
        names = [None, *(stage.name for stage in stages[1:])]
        found = read_together(torch.stack([entropies, final_entropies, chosen], 1), values, final_p.gather(-1, ids),
                              ids, _removing_stages(stages, ids), *_mask_parts(rows, indices, p))
        return [
            RowNumbers(
                *rounded_each(facts),
                self._candidates(top, raw, final, [names[int(stage)] for stage in removed]),
                mask,
            )
            for facts, raw, final, top, removed, *mask in found
        ]

    def _candidates(
        self, ids: list[float], raw: list[float], final: list[float], removed_by: list[str | None]
    ) -> list[Candidate]:
        ids = [int(token) for token in ids]
        pieces = self.tokens.pieces(ids)
        return [
            Candidate(token, piece, round(p, 6), round(f, 6), stage)
            for token, piece, p, f, stage in zip(ids, pieces, raw, final, removed_by)
        ]

    def _mask(self, rows: Rows, position: int, read: list[list[float]]) -> Mask:
        """The event of a mask, from the columns of `_mask_parts`."""
        values, ids, (banned_mass, count, may_end) = read
        favourites = [Candidate(int(token), self.tokens.piece(int(token)), round(raw, 6), 0.0, "mask")
                      for token, raw in zip(ids, values) if raw > 0]
        return Mask(
            position,
            int(count),
            rows.masks.shape[1],
            rounded(banned_mass),
            favourites,
            [],
            bool(may_end),
            rows.grammar_state,
            rounded(rows.mask_seconds / len(rows.masks)),
        )

    def cache(self, store: KVCache, drafted: int, settled: Settled) -> list[Event]:
        """The state of the target's cache after a commit, and what a policy did to it.

        `drafted` is how many slots the draft tokens of the round took.
        """
        freed, sizes = store.take_freed(), store.sizes()
        live = [] if freed else [[[(0, store.length)]]]
        return [
            Cache(
                "target",
                store.length,
                store.depth,
                sizes.heads,
                live,
                drafted,
                settled.freed,
                sum(len(moving.heads) for moving in settled.joined if moving),
                sizes.quantised_slots,
                sizes.bytes,
                sizes.common,
                sizes.common_bytes,
                dropped=_evictions(store, freed, settled.joined),
                state_bytes=sizes.state_bytes,
            )
        ]


def _evictions(store: KVCache, freed: FreedSlots | None, joined: list[MergedTokens | None]) -> list[str]:
    """`dropped` of a Cache event: what was evicted since the last one, or everything that is not live."""
    merged = {
        (layer, head): dict(pairs)
        for layer, moving in enumerate(joined) if moving
        for head, pairs in enumerate(moving.by_head(store.heads))
    }
    if freed:
        gone = {head: spans(positions, merged.get(head, {})) for head, positions in freed.positions().items()}
    else:
        gone = {
            (layer, head): with_targets(holes(runs, store.length), merged.get((layer, head), {}))
            for layer, heads in enumerate(store.runs()) for head, runs in enumerate(heads)
        }
    if not gone:
        return []
    return write_layers([
        [write_head(gone.get((layer, head), [])) for head in range(len(slots.positions))]
        for layer, slots in enumerate(store.slots)
    ])


def _mask_parts(rows: Rows, indices: list[int], p: Tensor) -> list[Tensor]:
    """What is recorded of the masks of these rows, whose distributions are p [n, V]; empty without a grammar.

    The probabilities of the most probable masked tokens, these tokens, and [n, 3]: the probability that is masked, the
    number of allowed tokens, and whether an end token is among them.
    """
    if rows.masks is None:
        return []
    allowed = rows.masks[rows.index(indices)]
    banned = p.masked_fill(allowed, 0.0)
    ends = [token for token in rows.chain.end_ids if token < allowed.shape[1]]
    may_end = torch.stack([allowed[:, token] for token in ends]).any(0) if ends else allowed.new_zeros(len(indices))
    sums = torch.stack([banned.sum(-1), allowed.sum(-1).to(p.dtype), may_end.to(p.dtype)], 1)
    return [*largest(banned, FAVOURITES), sums]


def _removing_stages(stages: list[Stage], tokens: Tensor) -> Tensor:
    """For tokens [n, k] of rows: the number of the first stage that removed each, [n, k]; 0 for none."""
    first = torch.zeros_like(tokens)
    for number in range(len(stages) - 1, 0, -1):  # earlier stages overwrite later ones
        first = first.masked_fill(stages[number].scores.gather(-1, tokens) == REMOVED, number)
    return first


def _processed(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The distribution of scores after masks and samplers, [n, V], and its entropy in nats, [n].

    Without a sampler that draws, the most probable token of this distribution is taken.
    """
    p = scores.softmax(-1).nan_to_num()
    return p, entropy_of(p, scores).nan_to_num()


class Silent(Recorder):
    """Records only Commits."""

    top: int = 0

    def committed(self, committed: list[CommittedToken], start: int, text: str) -> list[Event]:
        return [self._commit(committed, start, text, [None] * len(committed))]

    def cache(self, store: KVCache, drafted: int, settled: Settled) -> list[Event]:
        return []
