"""A cache policy acts on a KV cache: it evicts, merges and quantises slots."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from playground.contract import CachePolicy, CutsPrompt, Held, Merges, Quantises, ReadsAttention
from playground.decoding.policy_connection import PolicyConnection, RotateBack
from playground.decoding.recorder import Settled
from playground.engine.host_copies import on_device

if TYPE_CHECKING:
    from playground.engine.cache.kv_buffer import Encode, MergedTokens
    from playground.engine.cache.kv_cache import KVCache


class ActingPolicy:
    """One cache policy and the KV cache that it acts on."""

    def __init__(self, policy: CachePolicy, store: KVCache, prompt: int, rotate_back: RotateBack | None = None):
        """`rotate_back` is the model's. Raises Refusal if the policy needs it and the model has none."""
        self.policy, self.store, self.prompt = policy, store, prompt
        self.connection = PolicyConnection(policy, store, prompt, rotate_back)
        self._rotate_back = rotate_back
        self._acted_at = 0  # tokens of the text when the policy acted last

    def beside(self, store: KVCache, policy: CachePolicy) -> ActingPolicy:
        """The same for a copy of the cache and a copy of the policy."""
        return ActingPolicy(policy, store, self.prompt, self._rotate_back)

    @property
    def rehearsing(self) -> bool:
        """Whether probe tokens are read."""
        return self.connection.rehearsing

    def watch(self) -> Callable[[int], bool] | None:
        """By position, whether the policy wants a row's attention; None if it wants none."""
        policy, prompt = self.policy, self.prompt
        return (lambda at: policy.wants_attention(at, prompt)) if isinstance(policy, ReadsAttention) else None

    @property
    def is_due(self) -> bool:
        """Whether tokens were committed since the policy acted."""
        return self.store.length > self._acted_at

    def rests(self, length: int) -> bool:
        """Whether the policy changes nothing once the text has `length` tokens, if it was not shortened before."""
        policy, store = self.policy, self.store
        added = length - store.length
        if isinstance(policy, Quantises) and type(policy).retain is Quantises.retain:
            return not any(
                policy.quantise_count(part, store.slots_of(layer).count + added - buffers[layer].quantised_slots)
                for part, buffers in (("keys", store.keys), ("values", store.values))
                for layer in self._quantised(range(store.depth))
            )
        return policy.rests(max(slots.count for slots in store.slots) + added, length, self.prompt)

    def select_prompt(self, layer: int) -> Tensor:
        """Which prompt tokens held by the layer before `layer` continue, bool [slots]. Later layers hold no others.

        Raises TypeError for a policy that cuts no prompts.
        """
        if not isinstance(self.policy, CutsPrompt):
            raise TypeError(f"{self.policy.name} cuts no prompts")
        held = self._held(layer - 1, "prefill", self.prompt)
        selected = self.policy.select_prompt(held)
        selected = selected | (held.positions == self.prompt - 1)  # the last row gives the first token
        self.store.evict_from(layer, selected)
        return selected[0]

    def act_on(self, layer: int) -> None:
        """Let the policy act on one layer after a token was committed."""
        policy, store = self.policy, self.store
        policy.text_length = store.length
        if isinstance(policy, Quantises):
            store.quantise(self._quantised([layer]), policy.quantise_count, _encoder(policy))
        held = self._held(layer, "keep", store.length)
        live = policy.retain_all([held])
        if isinstance(policy, Merges):
            self._merge(policy, held, live[0])
        store.evict(live)

    def act(self, moment: str, next_position: int) -> Settled:
        """Let the policy act on all layers; returns what it did."""
        policy, store = self.policy, self.store
        policy.text_length = self._acted_at = store.length
        if isinstance(policy, Quantises):
            store.quantise(self._quantised(range(store.depth)), policy.quantise_count, _encoder(policy))
        if policy.row_wise:
            next_row = on_device([[next_position]], store.device)
            return Settled(store.evict([policy.visible(next_row, slots.positions) for slots in store.slots]))
        held = [self._held(layer, moment, next_position) for layer in range(store.depth)]
        live = policy.retain_all(held)
        joined = []
        if isinstance(policy, Merges):
            joined = [self._merge(policy, layer, retained) for layer, retained in zip(held, live)]
        return Settled(store.evict(live), joined if any(joined) else [])

    def _quantised(self, layers: Iterable[int]) -> list[int]:
        """Those of the layers that the policy quantises."""
        policy, depth = self.policy, self.store.depth
        return [layer for layer in layers if isinstance(policy, Quantises) and policy.quantises_layer(layer, depth)]

    def _merge(self, policy: Merges, held: Held, live: Tensor) -> MergedTokens | None:
        """Merge evicted slots of a layer into live ones; returns which, or None."""
        retained = (live & held.live).expand(self.store.heads, -1)
        evicted = held.live & ~retained
        merge = policy.merge(held, retained, evicted) if bool(evicted.any()) else None
        return self.store.merge(held.layer, *merge) if merge else None

    def _held(self, layer: int, moment: str, next_position: int) -> Held:
        store = self.store
        slots = store.slots_of(layer)

        def read(part: str) -> Tensor:
            return getattr(store, part)[layer].read(slots.count).to(store.device)

        def write(part: str, rows: Tensor) -> None:
            getattr(store, part)[layer].write(0, rows.to(store.device_of(layer)))

        return Held(layer, store.depth, moment, self.prompt, next_position, slots.positions, read, write)


def _encoder(policy: Quantises) -> Callable[[int, str], Encode]:
    """How a policy encodes the rows of a layer's keys or values."""
    return lambda layer, part: lambda rows, packed: policy.quantise_layer(layer, part, rows, packed)
