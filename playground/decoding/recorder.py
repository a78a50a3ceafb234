"""Turns rows, committed tokens and caches into events.

A lane has one recorder. `Silent` records only the text; the benchmark uses it to measure the overhead of recording.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT
from playground.engine.sampling import entropy_of, largest
from playground.events import Cache, Candidate, Commit, Event, Mask, Origin, Step, rounded
from playground.trace.cache_contents import holes, spans, with_targets, write_head, write_layers

if TYPE_CHECKING:
    from playground.decoding.rows import Rows
    from playground.engine.freed_slots import FreedSlots
    from playground.engine.kv_buffer import MergedTokens
    from playground.engine.kv_cache import KVCache
    from playground.engine.tokens import Tokens

FAVOURITES = 5  # masked tokens that are listed


@dataclass
class CommittedToken:
    """A token to commit, and the row it was chosen from; forced tokens have none."""

    token: int
    origin: Origin
    rows: Rows | None = None
    node: int = ROOT


class Settled(NamedTuple):
    """What a policy did to a cache."""

    freed: int = 0  # slots evicted, over layers and heads
    joined: list[MergedTokens | None] = []  # by layer, the slots merged into others; empty if no layer merged any


@dataclass
class Recorder:
    """Events of committed tokens and of the target's cache."""

    tokens: Tokens
    top: int = 10  # candidates recorded for each token

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
        return Commit(start, ids, [self.tokens.piece(i) for i in ids], text, logprobs, origins)

    def _steps(self, committed: list[CommittedToken], positions: list[int]) -> tuple[list[Event], list[float]]:
        """Steps and Masks, and log-probabilities. The tokens of one commit come from one forward and are batched."""
        rows = committed[0].rows
        indices = [rows.row(item.node) for item in committed]
        stages = rows.stages_of(indices)
        raw, final = stages[0].scores, stages[-1].scores
        logp = raw.log_softmax(-1)
        p = logp.exp()
        values, ids = largest(p, min(self.top, p.shape[-1]))
        entropies = entropy_of(p, raw)
        unchanged = final.data_ptr() == raw.data_ptr()  # no sampler changed the scores
        final_p, final_entropies = (p, entropies) if unchanged else _processed(final)
        chosen = torch.stack([logp[i, item.token] for i, item in enumerate(committed)])
        numbers = read_together(torch.stack([entropies, final_entropies, chosen], 1), values, final_p.gather(-1, ids),
                                ids, rows.removing_stages(indices, ids))
        names = [None, *(stage.name for stage in stages[1:])]
        events: list[Event] = []
        for i, (item, position, index, row) in enumerate(zip(committed, positions, indices, numbers)):
            (raw_entropy, final_entropy, _), *columns, numbers_of_stages = row
            top = self._candidates(*columns, [names[int(number)] for number in numbers_of_stages])
            events.append(Step(position, rounded(raw_entropy), rounded(final_entropy), item.token, top, rows.stream))
            if rows.masks is not None:
                events.append(self._mask(rows, index, position, p[i]))
        return events, [rounded(row[0][2]) for row in numbers]

    def _candidates(
        self, raw: list[float], final: list[float], ids: list[float], removed_by: list[str | None]
    ) -> list[Candidate]:
        ids = [int(token) for token in ids]
        pieces = self.tokens.pieces(ids)
        return [
            Candidate(token, piece, round(p, 6), round(f, 6), stage)
            for token, piece, p, f, stage in zip(ids, pieces, raw, final, removed_by)
        ]

    def _mask(self, rows: Rows, index: int, position: int, p: Tensor) -> Mask:
        allowed = rows.masks[index]
        banned = p.masked_fill(allowed, 0.0)
        values, ids = largest(banned, FAVOURITES)
        ends = [token for token in rows.chain.end_ids if token < len(allowed)]
        may_end = torch.stack([allowed[token] for token in ends]).any() if ends else allowed.new_zeros(())
        sums = torch.stack([banned.sum(), allowed.sum().to(p.dtype), may_end.to(p.dtype)])
        (values, ids, (banned_mass, count, may_end)), = read_together(values[None], ids[None], sums[None])
        favourites = [Candidate(int(token), self.tokens.piece(int(token)), round(raw, 6), 0.0, "mask")
                      for token, raw in zip(ids, values) if raw > 0]
        return Mask(
            position,
            int(count),
            len(allowed),
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
        freed = store.take_freed()
        live = [] if freed else [[[(0, store.length)]]]
        return [
            Cache(
                "target",
                store.length,
                store.depth,
                store.heads,
                live,
                drafted,
                settled.freed,
                sum(len(moving.heads) for moving in settled.joined if moving),
                store.quantised_slots(),
                store.bytes(),
                store.common,
                store.common_bytes(),
                dropped=_evictions(store, freed, settled.joined),
                state_bytes=store.state_bytes(),
            )
        ]


def read_together(*parts: Tensor) -> list[list[list[float]]]:
    """The numbers of tensors [n, k], each with its own k: for each of the n rows the columns of every part.

    They are read in one transfer, since a GPU runs empty while the host waits. Integers must be below 2^24.
    """
    widths = [part.shape[1] for part in parts]
    joined = torch.cat([part.to(parts[0].dtype) for part in parts], 1).tolist()
    ends = list(accumulate(widths))
    return [[row[end - width:end] for width, end in zip(widths, ends)] for row in joined]


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
    return write_layers([
        [write_head(gone.get((layer, head), [])) for head in range(len(slots.positions))]
        for layer, slots in enumerate(store.slots)
    ])


def _processed(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The distribution of scores after masks and samplers, [n, V], and its entropy in nats, [n].

    Without a sampler that draws, the most probable token of this distribution is taken.
    """
    p = scores.softmax(-1).nan_to_num()
    return p, entropy_of(p, scores).nan_to_num()


class Silent(Recorder):
    """Records only Commits."""

    def committed(self, committed: list[CommittedToken], start: int, text: str) -> list[Event]:
        return [self._commit(committed, start, text, [None] * len(committed))]

    def cache(self, store: KVCache, drafted: int, settled: Settled) -> list[Event]:
        return []
