"""What a cache policy does to the target's cache, and when: after the prompt, and after every keep."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.contract import CachePolicy, Held
from playground.engine.attention_mask import Focus, Renumbering, Window
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.engine.kv_buffer import Moving
    from playground.engine.kv_cache import Store


Turn = Callable[[Tensor, Tensor], Tensor]
"""turn(rotated queries [heads, n, d], positions [n]) -> the same, so many positions earlier"""


class Settled(NamedTuple):
    """What a policy did to a cache."""

    freed: int = 0  # slots, over layers and heads
    joined: list[Moving | None] = []  # by layer, what was merged into other tokens; None where nothing was, empty where nothing was in any


class Retention:
    """One policy at work on one store."""

    def __init__(self, policy: CachePolicy, store: Store, prompt: int, turn: Turn | None = None):
        """`turn` moves the model's rotated queries towards the start; raises Refusal where the policy asks for that and there is none."""
        self.policy, self.store, self.prompt = policy, store, prompt
        self._asked_for: dict[int, int] = {}  # rows of the prompt that a layer told of
        if policy.row_wise:
            store.window = Window(policy.visible, prompt)
        if policy.watches:
            store.hear = policy.attended
        if policy.focuses:
            store.focus = Focus(policy.focus, self._chooses)  # bound, so that a copied lane asks its own policy
        if policy.asks:
            store.ask = self._asked
        if policy.renumbers:
            store.renumbering = self._renumbering(turn)

    def _renumbering(self, turn: Turn | None) -> Renumbering:
        if turn is None:
            raise Refusal(f"This model's positions cannot be renumbered, as {self.policy.name} is to do: leave them true.", "positions")
        return Renumbering(self.policy.skipped, self.policy.far, turn, self.prompt)

    def _chooses(self, position: int) -> bool:
        return self.policy.chooses(position, self.prompt)

    def _asked(self, layer: int, queries: Tensor, positions: list[int]) -> None:
        """Tell the policy what rows of the prompt look for; a token that is read again is not told of twice."""
        told = self._asked_for.get(layer, 0)
        fresh = [row for row, position in enumerate(positions) if told <= position < self.prompt]
        if fresh:
            self._asked_for[layer] = positions[fresh[-1]] + 1
            self.policy.asked(layer, queries[:, :, fresh])

    def watch(self) -> Callable[[int], bool] | None:
        """Says of a row, by its position, whether its attention is wanted; None where no row's is."""
        return (lambda position: self.policy.wants(position, self.prompt)) if self.policy.watches else None

    def send_on(self, layer: int) -> Tensor:
        """Which of the prompt's tokens that the layer before `layer` has read go on, [slots]; of the prompt those from `layer` on hold nothing else."""
        held = self._held(layer - 1, "prefill", self.prompt)
        onward = self.policy.onward(held) | (held.positions == self.prompt - 1)  # the row behind the last one is the answer
        self.store.narrow(layer, onward)
        return onward[0]

    def hear_rehearsal(self, count: int) -> None:
        """Tell the policy what the `count` rows of the scratch, which will be forgotten, attended to; of each other they do not vote."""
        rows = self.store.length + torch.arange(count, device=self.store.device)
        for layer, weights in (item for noted in self.store.attention for item in noted.layers.items()):
            slots = self.store.slots_of(layer)
            self.policy.attended(layer, weights[:, :, :slots.count], rows, slots.positions)

    def settle(self, moment: str, next_position: int) -> Settled:
        """Free, merge and pack what the policy says."""
        if self.policy.packs:
            self.store.pack(self.policy.due, {part: self._encoder(part) for part in ("keys", "values")})
        if self.policy.row_wise:
            next_row = torch.tensor([[next_position]], device=self.store.device)
            return Settled(self.store.evict([self.policy.visible(next_row, slots.positions) for slots in self.store.slots]))
        held = [self._held(layer, moment, next_position) for layer in range(self.store.depth)]
        live = self.policy.retain_all(held)
        joined = [self._merge(layer, stays) for layer, stays in zip(held, live)] if self.policy.merges else []
        return Settled(self.store.evict(live), joined if any(joined) else [])

    def _merge(self, held: Held, live: Tensor) -> Moving | None:
        """Let what is freed of a layer leave something behind; returns what did."""
        stays = (live & held.live).expand(self.store.heads, -1)
        goes = held.live & ~stays
        merge = self.policy.merge(held, stays, goes) if bool(goes.any()) else None
        return self.store.merge(held.layer, *merge) if merge else None

    def _encoder(self, part: str) -> Callable:
        return lambda rows, packed: self.policy.encode(part, rows, packed)

    def _held(self, layer: int, moment: str, next_position: int) -> Held:
        store = self.store
        slots = store.slots_of(layer)

        def read(part: str) -> Tensor:
            return getattr(store, part)[layer].read(slots.count)

        def write(part: str, rows: Tensor) -> None:
            getattr(store, part)[layer].write(0, rows)

        return Held(layer, store.depth, moment, self.prompt, next_position, slots.positions, read, write)


def everything(held: Held) -> Tensor:
    """All slots stay, [1 or kv_heads, slots]."""
    return torch.ones_like(held.positions, dtype=torch.bool)
