"""Tables of a lane for analysis: its draft tokens, its rounds of drafting, the alternatives to its tokens, its caches.

Each is a list of rows in the order of the trace. Imports neither torch nor gradio.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from playground.events import Cache, Candidate, Draft, Origin, Stamped, Test, Verdict
from playground.trace.cache_contents import live_counts
from playground.trace.transcript import Written, advance, sequences


class DraftRow(NamedTuple):
    """One draft token and what became of it."""

    sequence: int
    round: int
    position: int  # among the generated tokens, if it is accepted
    depth: int  # in the draft tree, from 1
    node: int
    parent: int  # another node; -1 is the end of the committed text
    id: int
    text: str
    source: str  # the strategy that proposed it
    draft_probability: float  # of the drafter; 1 if it has none
    target_probability: float | None  # in its last test, also that in the residual; None if it was not tested
    tested: bool
    accepted: bool  # on the accepted path


class RoundRow(NamedTuple):
    """One draft and its verdict."""

    sequence: int
    round: int
    position: int  # of the first token that it wrote, among the generated tokens
    drafted: int  # draft tokens, all branches
    accepted: int
    id: int | None  # of the target's own token after the accepted ones; None for none
    text: str
    origin: Origin | None  # bonus after a draft that was accepted to its end, redraw in place of a rejected token


class AlternativeRow(NamedTuple):
    """One of the most probable tokens where a token of a text was chosen."""

    sequence: int
    position: int  # among the generated tokens, from 0
    rank: int  # by the model's own probability, from 1
    id: int
    text: str
    probability: float  # the model's own
    final_probability: float  # after masks and samplers
    removed_by: str | None  # the stage that removed it, such as "mask" or "top_k"
    chosen: bool


class CacheRow(NamedTuple):
    """A KV cache after one commit."""

    stream: str  # target or draft
    seconds: float  # on the lane's clock
    length: int  # tokens read so far, evicted ones included
    live: int  # most live slots of any KV head
    mean_live: float  # live slots, mean over layers and KV heads
    evicted: int  # slots freed by this commit, summed over layers and heads
    merged: int  # of these, slots whose keys and values were merged into others
    packed: int  # oldest tokens whose slots are quantised
    bytes: int


class JudgedDraft(NamedTuple):
    """A draft, its verdict, and how many tokens its sequence had before."""

    draft: Draft
    verdict: Verdict
    position: int


def draft_tokens(events: list[Stamped]) -> list[DraftRow]:
    return [token for found in _rounds(events) for token in _tokens(found)]


def rounds(events: list[Stamped]) -> list[RoundRow]:
    return [_round(found) for found in _rounds(events)]


def rounds_of_tokens(events: list[Stamped]) -> dict[tuple[int, int], int]:
    """The round of drafting that wrote a token, by its sequence and position; others were not written in one."""
    return {
        (row.sequence, row.position + place): row.round
        for row in rounds(events) for place in range(row.accepted + (row.id is not None))
    }


def caches(events: list[Stamped]) -> list[CacheRow]:
    """A row for every commit and stream, in the order of the events."""
    stamped = [(stamped.at, stamped.event) for stamped in events if isinstance(stamped.event, Cache)]
    counts = {stream: live_counts(cache for _, cache in stamped if cache.stream == stream)
              for stream in {cache.stream for _, cache in stamped}}
    return [_cache_row(at, cache, next(counts[cache.stream])) for at, cache in stamped]


def _cache_row(at: float, cache: Cache, live: list[int]) -> CacheRow:
    return CacheRow(cache.stream, at, cache.length, max(live, default=0), sum(live) / max(1, len(live)), cache.evicted,
                    cache.merged, cache.packed, cache.bytes)


def alternatives(events: list[Stamped]) -> list[AlternativeRow]:
    return [
        row
        for sequence, written in sorted(sequences(events).items())
        for position, step in sorted(written.steps.items()) if position < len(written.tokens)
        for row in _ranked(sequence, position, written, step.top)
    ]


def _rounds(events: list[Stamped]) -> Iterator[JudgedDraft]:
    """Every draft that was verified."""
    texts: dict[int, Written] = {0: Written()}
    open_drafts: dict[tuple[int, int], tuple[Draft, int]] = {}
    for stamped in events:
        event = stamped.event
        if isinstance(event, Draft):
            before = texts.get(event.sequence, Written())
            open_drafts[event.sequence, event.round] = event, len(before.tokens)
        elif isinstance(event, Verdict) and (found := open_drafts.pop((event.sequence, event.round), None)):
            yield JudgedDraft(found[0], event, found[1])
        advance(texts, stamped)


def _tokens(found: JudgedDraft) -> Iterator[DraftRow]:
    draft, verdict, start = found
    tests: dict[int, Test] = {test.node: test for test in verdict.tests}
    depths: list[int] = []
    for node, (token, piece, parent, q) in enumerate(zip(draft.tokens, draft.pieces, draft.parents, draft.q)):
        depths.append(depths[parent] + 1 if 0 <= parent < node else 1)
        test = tests.get(node)
        yield DraftRow(
            draft.sequence, draft.round, start + depths[node] - 1, depths[node], node, parent, token, piece,
            draft.source, q, test.p if test else None, test is not None, node in verdict.kept,
        )


def _round(found: JudgedDraft) -> RoundRow:
    draft, verdict, start = found
    own = verdict.token >= 0
    return RoundRow(
        draft.sequence, draft.round, start, len(draft.tokens), len(verdict.kept), verdict.token if own else None,
        verdict.piece, verdict.origin if own else None,
    )


def _ranked(sequence: int, position: int, written: Written, top: list[Candidate]) -> Iterator[AlternativeRow]:
    chosen = written.tokens[position].id
    for rank, found in enumerate(sorted(top, key=lambda candidate: -candidate.raw), 1):
        yield AlternativeRow(sequence, position, rank, found.id, found.piece, found.raw, found.final, found.fell,
                          found.id == chosen)
