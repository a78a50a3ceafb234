"""Turns rows, kept tokens and caches into events: what the model thought before each token, and what it weighed.

A lane holds one recorder. `Silent` notes only the text itself; the benchmark uses it to say what recording costs.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.contract.token_tree import ROOT
from playground.engine.sampling import entropy
from playground.events import Cache, Candidate, Commit, Event, Mask, Origin, Step

if TYPE_CHECKING:
    from playground.decoding.rows import Rows
    from playground.engine.kv_buffer import MergedTokens
    from playground.engine.kv_cache import KVCache
    from playground.engine.tokens import Tokens

# a logarithm for what is impossible: times its probability it is nothing, where minus infinity is no number
LOWEST = -1e30
FAVOURITES = 5  # banned tokens that are named


@dataclass
class Kept:
    """A token on its way into the text, and the row it came from; forced tokens have none."""

    token: int
    origin: Origin
    rows: Rows | None = None
    node: int = ROOT


class Settled(NamedTuple):
    """What a policy did to a cache."""

    freed: int = 0  # slots, over layers and heads
    # by layer, what was merged into other slots; empty if nothing was in any layer
    joined: list[MergedTokens | None] = []


@dataclass
class Recorder:
    tokens: Tokens
    top: int = 10  # candidates noted for each token

    def committed(self, kept: list[Kept], start: int, text: str) -> list[Event]:
        """Events of freshly committed tokens: a Step and perhaps a Mask for each that has a row, then the Commit."""
        events: list[Event] = []
        logprobs: list[float | None] = [None] * len(kept)
        seen = [(i, k) for i, k in enumerate(kept) if k.rows is not None]
        if seen:
            events, found = self._thoughts([k for _, k in seen], [start + i for i, _ in seen])
            for (i, _), logprob in zip(seen, found):
                logprobs[i] = logprob
        forced = [k.token for k in kept if k.rows is None]
        for mask in [event for event in events if isinstance(event, Mask)][-1:]:
            mask.forced = forced
        events.append(self._commit(kept, start, text, logprobs))
        return events

    def _commit(self, kept: list[Kept], start: int, text: str, logprobs: list[float | None]) -> Commit:
        ids = [k.token for k in kept]
        return Commit(start, ids, [self.tokens.piece(i) for i in ids], text, logprobs, [k.origin for k in kept])

    def _thoughts(self, kept: list[Kept], positions: list[int]) -> tuple[list[Event], list[float]]:
        """All tokens of one keep come from rows of one forward, so they are reckoned together."""
        rows = kept[0].rows
        places = [rows.row(k.node) for k in kept]
        chosen = torch.tensor([k.token for k in kept], device=rows.raw.device)
        stages = rows.stages_of(places)
        logs = stages[0].scores.log_softmax(-1)
        p = logs.exp()
        values, ids = p.topk(min(self.top, p.shape[-1]), -1)
        # with the logarithms at hand much cheaper than to take them again
        uncertain = -(p * logs.clamp(min=LOWEST)).sum(-1)
        final_uncertain = entropy(stages[-1].scores) if len(stages) > 1 else uncertain
        numbers = torch.stack([uncertain, final_uncertain, logs.gather(-1, chosen[:, None])[:, 0]])
        raw_entropy, final_entropy, logprobs = numbers.tolist()
        tops = [
            self._candidates(*row)
            for row in zip(ids.tolist(), values.tolist(), rows.finals(places, ids).tolist(), rows.falls(places, ids))
        ]
        events: list[Event] = []
        for i, (k, position, place, top) in enumerate(zip(kept, positions, places, tops)):
            events.append(Step(position, raw_entropy[i], final_entropy[i], k.token, top, rows.stream))
            if rows.masks is not None:
                events.append(self._mask(rows, place, position, p[i]))
        return events, logprobs

    def _candidates(
        self, ids: list[int], raw: list[float], final: list[float], fell: list[str | None]
    ) -> list[Candidate]:
        pieces = self.tokens.pieces(ids)
        return [
            Candidate(token, piece, round(p, 6), round(f, 6), why)
            for token, piece, p, f, why in zip(ids, pieces, raw, final, fell)
        ]

    def _mask(self, rows: Rows, place: int, position: int, p: Tensor) -> Mask:
        allowed = rows.masks[place]
        banned = p.masked_fill(allowed, 0.0)
        values, ids = banned.topk(FAVOURITES)
        favourites = [Candidate(token, self.tokens.piece(token), round(raw, 6), 0.0, "mask")
                      for token, raw in zip(ids.tolist(), values.tolist()) if raw > 0]
        may_end = any(bool(allowed[token]) for token in rows.chain.end_ids if token < len(allowed))
        return Mask(
            position,
            int(allowed.sum()),
            len(allowed),
            float(banned.sum()),
            favourites,
            [],
            may_end,
            rows.grammar_state,
            rows.mask_seconds / len(rows.masks),
        )

    def cache(self, store: KVCache, guesses: int, settled: Settled) -> list[Event]:
        """What the target's cache holds after a keep, and what a policy did to it."""
        merged = sum(len(moving.heads) for moving in settled.joined if moving)
        joined = [moving.by_head(store.heads) if moving else [[]] * store.heads for moving in settled.joined]
        return [
            Cache(
                "target",
                store.length,
                store.depth,
                store.heads,
                store.runs(),
                guesses,
                settled.freed,
                merged,
                store.packed(),
                store.bytes(),
                store.common,
                store.common_bytes(),
                joined,
            )
        ]


class Silent(Recorder):
    """Only the text, no thoughts."""

    def committed(self, kept: list[Kept], start: int, text: str) -> list[Event]:
        return [self._commit(kept, start, text, [None] * len(kept))]

    def cache(self, store: KVCache, guesses: int, settled: Settled) -> list[Event]:
        return []
