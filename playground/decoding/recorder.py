"""Turns rows, committed tokens and caches into events.

A lane has one recorder. `Silent` records only the text; the benchmark uses it to measure the overhead of recording.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from playground.contract.token_tree import ROOT
from playground.decoding.rows import read_records
from playground.engine.row_numbers import CANDIDATES
from playground.events import Cache, Candidate, Commit, Event, Mask, Origin, Step, rounded, rounded_each
from playground.trace.cache_contents import holes, spans, with_targets, write_head, write_layers

if TYPE_CHECKING:
    from torch import Tensor

    from playground.decoding.row_records import RowRecord
    from playground.decoding.rows import Rows
    from playground.engine.cache.freed_slots import FreedSlots
    from playground.engine.cache.kv_buffer import MergedTokens
    from playground.engine.cache.kv_cache import KVCache
    from playground.engine.text.tokens import Tokens


class CommittedToken(NamedTuple):
    """A token to commit, and the row it was chosen from; forced tokens have none."""

    token: int
    origin: Origin
    rows: Rows | None = None
    node: int = ROOT


def rows_of(committed: list[CommittedToken]) -> Rows | None:
    """The rows that tokens of one commit were chosen from; None if all are forced."""
    return next((item.rows for item in committed if item.rows is not None), None)


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


@dataclass
class Recorder:
    """Events of committed tokens and of the target's cache."""

    tokens: Tokens
    top: int = CANDIDATES  # candidates recorded for each token

    def committed(self, committed: list[CommittedToken], start: int, text: str) -> tuple[list[Event], Commit]:
        """Events of new tokens: a Step, and with a grammar a Mask, for each that has a row; and the Commit."""
        events: list[Event] = []
        logprobs: list[float | None] = [None] * len(committed)
        chosen = [i for i, item in enumerate(committed) if item.rows is not None]
        if (rows := rows_of(committed)) is not None:
            events, found = self._steps(rows, [committed[i] for i in chosen], [start + i for i in chosen])
            for i, logprob in zip(chosen, found):
                logprobs[i] = logprob
        forced = [item.token for item in committed if item.rows is None]
        for mask in [event for event in events if isinstance(event, Mask)][-1:]:
            mask.forced = forced
        return events, self._commit(committed, start, text, logprobs)

    def _commit(
        self, committed: list[CommittedToken], start: int, text: str, logprobs: list[float | None]
    ) -> Commit:
        ids, origins = [item.token for item in committed], [item.origin for item in committed]
        return Commit(start, ids, self.tokens.pieces(ids), text, logprobs, origins)

    def _steps(
        self, rows: Rows, committed: list[CommittedToken], positions: list[int]
    ) -> tuple[list[Event], list[float]]:
        """Steps and Masks, and log-probabilities. The tokens of one commit come from one forward and are batched."""
        tokens = [item.token for item in committed]
        events: list[Event] = []
        records = read_records(rows, [item.node for item in committed], tokens, self.top)
        facts = [rounded_each([row.entropy, row.final_entropy, row.logprob]) for row in records]
        for row, (entropy, final_entropy, _), position in zip(records, facts, positions):
            events.append(Step(position, entropy, final_entropy, row.token, self._candidates(row), rows.stream))
            if row.mask:
                events.append(self._mask(rows, position, row.mask))
        return events, [logprob for *_, logprob in facts]

    def _candidates(self, row: RowRecord) -> list[Candidate]:
        pieces = self.tokens.pieces(row.ids)
        return [
            Candidate(token, piece, round(p, 6), round(f, 6), stage)
            for token, piece, p, f, stage in zip(row.ids, pieces, row.p, row.final_p, row.removed_by)
        ]

    def _mask(self, rows: Rows, position: int, read: list[list[float]]) -> Mask:
        """The event of a mask, from the columns of `mask_numbers`."""
        values, ids, (banned_mass, count, may_end) = read
        favourites = [Candidate(int(token), self.tokens.piece(int(token)), round(raw, 6), 0.0, "mask")
                      for token, raw in zip(ids, values) if raw > 0]
        return Mask(
            position,
            int(count),
            rows.raw.shape[1],
            rounded(banned_mass),
            favourites,
            [],
            bool(may_end),
            rows.grammar_state,
            rounded(rows.mask_seconds / rows.count),
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


class Silent(Recorder):
    """Records only Commits."""

    top: int = 0

    def committed(self, committed: list[CommittedToken], start: int, text: str) -> tuple[list[Event], Commit]:
        return [], self._commit(committed, start, text, [None] * len(committed))

    def cache(self, store: KVCache, drafted: int, settled: Settled) -> list[Event]:
        return []
