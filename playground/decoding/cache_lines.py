"""Caches of one layer after tokens that are not committed, on each of which the cache policy has acted."""
from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from playground.contract import DecidesByHead
from playground.decoding.acting_policy import ActingPolicy
from playground.engine.attention.eager_attention import Scoring
from playground.engine.attention.segment_attention import QKV, Reach, Segment
from playground.engine.cache.kv_cache import Attention, KVCache
from playground.engine.host_copies import index_on

if TYPE_CHECKING:
    from playground.contract import CachePolicy


class LineToken(NamedTuple):
    """A token that lines have read last."""

    line: int
    token: int  # among those of its line


class NotedWeights(NamedTuple):
    """Attention weights of a token when it was read, over the slots and all that were read with it."""

    weights: Tensor  # [lines * kv_heads, tokens, slots + tokens]
    slots: int
    lines: int
    at: LineToken

    def row(self) -> Tensor:
        """Those over the slots and itself, [kv_heads, 1, slots + 1]."""
        heads, token = len(self.weights) // self.lines, self.at.token
        own = self.weights[self.at.line * heads:(self.at.line + 1) * heads, token:token + 1]
        return torch.cat([own[:, :, :self.slots], own[:, :, self.slots + token:self.slots + token + 1]], 2)


@dataclass(eq=False)
class Lines:
    """The caches of one layer after some tokens that are not committed, with the policy that acted on them.

    A line is the cache of one text. Several lie one after the other as further heads of one cache, so that one product
    serves all of them, and a policy that decides by head acts on all of them at once. The scratch holds the tokens that
    may come next, equally many of each line.
    """

    layer: int
    acting: ActingPolicy
    count: int = 1  # lines

    def read(self, new: QKV, scaling: float, sliding_window: Reach, scoring: Scoring | None) -> Tensor:
        """Attention of tokens that may come next, each in place of the others, [heads, count * n, d], line by line."""
        stacked = [as_heads(states, self.count) for states in new]
        segment = self._begin(stacked[0].shape[1])
        scoring = _for_lines(scoring, self.count)
        return as_rows(segment.attend(self.layer, stacked, scaling, sliding_window, scoring), self.count)

    def noted(self, at: LineToken) -> NotedWeights | None:
        """The attention of one of the tokens read last; None if the policy does not read it."""
        store = self.acting.store
        if not store.attention:
            return None
        return NotedWeights(store.attention[-1].layers[self.layer], self.slots, self.count, at)

    @property
    def slots(self) -> int:
        """Slots of each line without the scratch."""
        return self.acting.store.slots[0].count

    def go_on(self, token: int) -> Lines:
        """Commit the same one of the tokens read last in every line; the policy acts on it."""
        self.acting.store.commit(token)
        self.acting.act_on(self.layer)
        return self

    def branched(self, places: list[LineToken]) -> Lines:
        """Copies that go on with tokens read last, one line for each of them."""
        store, policy = self.acting.store, self.acting.policy
        heads, tokens = self._copied(places)
        weights = self._weights(heads, tokens)
        if isinstance(policy, DecidesByHead):
            twin = store.twin_with_token(self.layer, heads, tokens)
            copies = self._beside(twin, policy.for_heads(self.layer, heads), len(places))
            copies._begin(1)
        else:  # which acts on one line at a time
            copies = self._beside(store.twin_of_layer(self.layer), changing_alone(policy), 1)
            held = [buffers[self.layer].read(self.slots + len(store.parents)) for buffers in (store.keys, store.values)]
            token = self.slots + places[0].token
            copies._begin(1).write(self.layer, *(rows[:, token:token + 1] for rows in held))
        return copies._appended(weights)

    def repeated(self, count: int) -> Lines:
        """So many copies of a single line, for a policy that decides by head."""
        store, policy = self.acting.store, self.acting.policy
        if not isinstance(policy, DecidesByHead):
            raise TypeError(f"{policy.name} does not decide by head")
        heads = index_on([*range(store.heads)] * count, store.device)
        return self._beside(store.twin_of_layer(self.layer, heads), policy.for_heads(self.layer, heads), count)

    def append(self, states: list[Tensor], weights: Tensor | None) -> Lines:
        """Go on with a token of each line, given its key and value states [lines * kv_heads, 1, d] and its attention
        weights [lines * kv_heads, 1, slots + 1].
        """
        self._begin(1).write(self.layer, *states)
        return self._appended(weights)

    def _beside(self, store: KVCache, policy: CachePolicy, count: int) -> Lines:
        return Lines(self.layer, self.acting.beside(store, policy), count)

    def _appended(self, weights: Tensor | None) -> Lines:
        """Go on with the token of each line that the scratch holds, given its attention weights."""
        self.acting.store.attention = [] if weights is None else [Attention([0], {self.layer: weights})]
        return self.go_on(0)

    @property
    def bytes(self) -> int:
        """Memory of its keys and values."""
        store = self.acting.store
        return store.keys[self.layer].bytes(self.slots) + store.values[self.layer].bytes(self.slots)

    def _copied(self, places: list[LineToken]) -> tuple[Tensor, Tensor]:
        """For each head of a copy, the head it is copied from and the token it goes on with."""
        store = self.acting.store
        heads = store.heads // self.count
        pairs = [(place.line * heads + head, place.token) for place in places for head in range(heads)]
        return index_on([head for head, _ in pairs], store.device), index_on([at for _, at in pairs], store.device)

    def _weights(self, heads: Tensor, tokens: Tensor) -> Tensor | None:
        """Attention weights of tokens read last over the slots and themselves, [n, 1, slots + 1], for n heads."""
        store = self.acting.store
        if not store.attention:
            return None
        own = store.attention[-1].layers[self.layer][heads, tokens]
        itself = own.gather(1, (self.slots + tokens)[:, None])
        return torch.cat([own[:, :self.slots], itself], 1)[:, None]

    def _begin(self, count: int) -> Segment:
        segment = self.acting.store.extend([-1] * count)
        watches = self.acting.watch()
        if watches and watches(segment.positions[0]):
            segment.watched = list(range(count))
        return segment


def as_heads(states: Tensor, lines: int) -> Tensor:
    """States [heads, lines * n, d] of the tokens of each line, as [lines * heads, n, d]."""
    return states if lines == 1 else states.unflatten(1, (lines, -1)).transpose(0, 1).flatten(0, 1)


def as_rows(states: Tensor, lines: int) -> Tensor:
    """States [lines * heads, n, d], as [heads, lines * n, d]."""
    return states if lines == 1 else states.unflatten(0, (lines, -1)).transpose(0, 1).flatten(1, 2)


def _for_lines(scoring: Scoring | None, lines: int) -> Scoring | None:
    """What a model does to scores, with the sinks of its heads repeated for each line."""
    if scoring is None or scoring.sinks is None:
        return scoring
    return scoring._replace(sinks=scoring.sinks.repeat(lines))


def changing_alone(state: Any) -> Any:
    """A copy of a policy, or of a part of it, that changes on its own. Tensors are shared: policies replace them."""
    if isinstance(state, dict):
        alone = copy(state)
        for key, value in state.items():
            alone[key] = changing_alone(value)
        return alone
    if isinstance(state, list | set):
        return type(state)(map(changing_alone, state))
    if isinstance(state, Tensor) or not hasattr(state, "__dict__") or callable(state):
        return state
    if hasattr(type(state), "__deepcopy__"):
        return deepcopy(state)
    alone = copy(state)
    vars(alone).update({name: changing_alone(value) for name, value in vars(state).items()})
    return alone
