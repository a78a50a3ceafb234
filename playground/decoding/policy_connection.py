"""What a KV cache asks of a cache policy while rows are read, and what it tells it: masks, attention and queries."""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from playground.contract import (
    AddsMemory,
    CachePolicy,
    ReadsAttention,
    ReadsLayerInputs,
    ReadsProbeHeads,
    ReadsQueries,
    ReadsQueryHeads,
    RenumbersPositions,
    RestrictsPrompt,
    SelectsByStates,
    SelectsLines,
    SelectsPerRow,
)
from playground.engine.attention.attention_mask import Focus, LineChoice, Renumbering, Window
from playground.engine.host_copies import on_device
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.decoding.committed_states import CommittedStates
    from playground.engine.cache.kv_cache import KVCache

RotateBack = Callable[[Tensor, Tensor], Tensor]
"""rotate_back(query states [heads, n, head_dim], positions [n]) -> the states rotated back by so many positions"""


class PolicyConnection:
    """Connects one cache policy to the hooks of one KV cache."""

    def __init__(self, policy: CachePolicy, store: KVCache, prompt: int, rotate_back: RotateBack | None):
        """`rotate_back` is the model's. Raises Refusal if the policy needs it and the model has none."""
        self.policy, self.store, self.prompt = policy, store, prompt
        self.rehearsing = False  # whether probe tokens are read
        # by layer, prompt rows whose query states, and whose attention by query head, the policy has received
        self._queries_observed: dict[int, int] = {}
        self._heads_observed: dict[int, int] = {}
        self._states_observed = 0  # tokens of the text whose hidden states the policy has received
        self._connect_masks(rotate_back)
        if isinstance(policy, ReadsAttention):
            store.on_attention = self._observe_attention
        if isinstance(policy, ReadsQueries):
            store.on_queries = self._observe_queries
        if isinstance(policy, ReadsQueryHeads | ReadsProbeHeads):
            store.on_query_heads = self._observe_query_heads

    # --- what rows see ---

    def _connect_masks(self, rotate_back: RotateBack | None) -> None:
        policy, store = self.policy, self.store
        if policy.row_wise:
            store.window = Window(policy.visible, self._first_row())
        if isinstance(policy, SelectsPerRow):
            # bound, so that a copied lane uses its own policy
            by_states = policy.select_by_states if isinstance(policy, SelectsByStates) else None
            along = None
            if isinstance(policy, SelectsLines):
                along = LineChoice(policy.sampled_rows, policy.select_lines, self.prompt)
            store.focus = Focus(policy.select_for_rows, self._selects_for, by_states, along)
        if isinstance(policy, AddsMemory):
            store.memory = policy.attend_memory
        if isinstance(policy, RenumbersPositions) and policy.renumbers_positions:
            store.renumbering = self._renumbering(policy, rotate_back)

    def _renumbering(self, policy: RenumbersPositions, rotate_back: RotateBack | None) -> Renumbering:
        if rotate_back is None:
            raise Refusal(
                f"{policy.title} cannot renumber the positions of this model: switch renumbering off.", "positions"
            )
        return Renumbering(policy.gap_width, policy.before_gap, rotate_back, self._first_row())

    def _first_row(self) -> int:
        """Position of the first row that a policy based on positions applies to."""
        return 0 if isinstance(self.policy, RestrictsPrompt) and self.policy.restricts_prompt else self.prompt

    def _selects_for(self, position: int) -> bool:
        return isinstance(self.policy, SelectsPerRow) and self.policy.selects_for(position, self.prompt)

    # --- what the policy receives ---

    def observe_probes(self) -> None:
        """Pass the attention of the probe tokens to the policy, without their attention to each other."""
        if not isinstance(self.policy, ReadsAttention):
            return
        for noted in self.store.attention:
            rows = self.store.length + on_device(noted.nodes, self.store.device)
            for layer, weights in noted.layers.items():
                slots = self.store.slots_of(layer)
                self._observe_attention(layer, weights[:, :, :slots.count], rows, slots.positions)

    def observe_states(self, states: CommittedStates) -> None:
        """Pass the hidden states of committed tokens to the policy, each once, if it asked for some."""
        if not isinstance(self.policy, ReadsLayerInputs) or states.length <= self._states_observed:
            return
        first, layers = max(self._states_observed, states.start), self.policy.state_layers(self.store.depth)
        if layers:
            self.policy.observe_layer_inputs(first, {layer: states.of(layer, first) for layer in layers})
        self._states_observed = states.length

    def _observe_attention(
        self, layer: int, weights: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> None:
        """Pass the attention of committed rows to the policy."""
        self.policy.text_length = self.store.length
        if isinstance(self.policy, ReadsAttention):
            self.policy.observe_attention(layer, weights, query_positions, key_positions)

    def _observe_queries(self, layer: int, query_states: Tensor, positions: list[int]) -> None:
        """Pass the query states of prompt rows to the policy."""
        fresh = self._fresh(self._queries_observed, layer, positions)
        if fresh and isinstance(self.policy, ReadsQueries):
            self.policy.observe_queries(layer, query_states[:, :, fresh])

    def _observe_query_heads(self, layer: int, weights: Tensor, positions: list[int]) -> None:
        """Pass the attention of prompt rows, or of probe tokens, to the policy, by query head."""
        if self.rehearsing:
            if isinstance(self.policy, ReadsProbeHeads):
                self.policy.observe_probe_heads(layer, weights[..., :self.store.slots_of(layer).count])
        elif isinstance(self.policy, ReadsQueryHeads):
            if fresh := self._fresh(self._heads_observed, layer, positions):
                self.policy.observe_query_heads(layer, weights[:, :, fresh])

    def _fresh(self, observed: dict[int, int], layer: int, positions: list[int]) -> list[int]:
        """Rows of the prompt that the policy has not received, each row once even if it is read again."""
        before = observed.get(layer, 0)
        fresh = [row for row, position in enumerate(positions) if before <= position < self.prompt]
        if fresh:
            observed[layer] = positions[fresh[-1]] + 1
        return fresh


def renumbers(policy: CachePolicy) -> bool:
    """Whether rows use their index in the cache as position."""
    return isinstance(policy, RenumbersPositions) and policy.renumbers_positions
