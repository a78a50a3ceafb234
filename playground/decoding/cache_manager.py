"""Applies a lane's cache policy to the target's KV cache: after the prefill, and after every commit."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from playground.contract import (
    AddsMemory,
    CachePolicy,
    CutsPrompt,
    Held,
    Merges,
    Quantises,
    ReadsAttention,
    ReadsInChunks,
    ReadsParts,
    ReadsProbeHeads,
    ReadsProbes,
    ReadsQueries,
    ReadsQueryHeads,
    RenumbersPositions,
    RestrictsPrompt,
    SelectsByStates,
    SelectsLines,
    SelectsPerRow,
    Strategy,
)
from playground.decoding.recorder import Recorder, Settled, combined
from playground.decoding.rows_in_turn import RowsInTurn
from playground.engine.attention.attention_mask import Focus, LineChoice, Renumbering, Window
from playground.engine.heap_memory import give_back
from playground.engine.host_copies import on_device
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.engine.cache.kv_buffer import MergedTokens
    from playground.engine.cache.kv_cache import KVCache
    from playground.engine.model import Model
    from playground.events import Event

LONG = 1024  # prompt length, in tokens, from which returning evicted memory to the system is worth its milliseconds

RotateBack = Callable[[Tensor, Tensor], Tensor]
"""rotate_back(query states [heads, n, head_dim], positions [n]) -> the states rotated back by so many positions"""


class CacheManager:
    """Connects one cache policy, or none, to one KV cache."""

    def __init__(
        self,
        policy: CachePolicy | None,
        store: KVCache,
        prompt: int,
        recorder: Recorder,
        rotate_back: RotateBack | None = None,
    ):
        """`rotate_back` is the model's. Raises Refusal if the policy needs it and the model has none."""
        self.policy, self.store, self.prompt, self.recorder = policy, store, prompt, recorder
        # by layer, prompt rows whose query states, and whose attention by query head, the policy has received
        self._queries_observed: dict[int, int] = {}
        self._heads_observed: dict[int, int] = {}
        self.rehearsing = False  # whether probe tokens are read
        self._rotate_back = rotate_back
        self.turns: RowsInTurn | None = None  # of a policy that acts between the rows of a forward
        self._acted_at = 0  # tokens of the text when the policy acted last
        self._before: list[Settled] = []  # what it did between the tokens of a commit
        if policy:
            self._connect(policy, rotate_back)

    def take_turns(self) -> None:
        """Let the policy act between the rows of a forward, as it does when each is read alone."""
        self.turns = self.store.in_turn = RowsInTurn(self)

    def beside(self, store: KVCache, policy: CachePolicy) -> CacheManager:
        """A manager of a copy of the policy for a copy of the cache."""
        return CacheManager(policy, store, self.prompt, self.recorder, self._rotate_back)

    def _connect(self, policy: CachePolicy, rotate_back: RotateBack | None) -> None:
        store = self.store
        if policy.row_wise:
            store.window = Window(policy.visible, self._first_row(policy))
        if isinstance(policy, ReadsAttention):
            store.on_attention = self._observe_attention
        if isinstance(policy, SelectsPerRow):
            # bound, so that a copied lane uses its own policy
            by_states = policy.select_by_states if isinstance(policy, SelectsByStates) else None
            lines = isinstance(policy, SelectsLines)
            along = LineChoice(policy.sampled_rows, policy.select_lines, self.prompt) if lines else None
            store.focus = Focus(policy.select_for_rows, self._selects_for, by_states, along)
        if isinstance(policy, AddsMemory):
            store.memory = policy.attend_memory
        if isinstance(policy, ReadsQueries):
            store.on_queries = self._observe_queries
        if isinstance(policy, ReadsQueryHeads | ReadsProbeHeads):
            store.on_query_heads = self._observe_query_heads
        if renumbers(policy):
            store.renumbering = self._renumbering(policy, rotate_back)

    def _renumbering(self, policy: RenumbersPositions, rotate_back: RotateBack | None) -> Renumbering:
        if rotate_back is None:
            raise Refusal(
                f"{policy.title} cannot renumber the positions of this model: switch renumbering off.", "positions"
            )
        return Renumbering(policy.gap_width, policy.before_gap, rotate_back, self._first_row(policy))

    def _first_row(self, policy: CachePolicy) -> int:
        """Position of the first row that a policy based on positions applies to."""
        return 0 if isinstance(policy, RestrictsPrompt) and policy.restricts_prompt else self.prompt

    def _selects_for(self, position: int) -> bool:
        return self.policy.selects_for(position, self.prompt)

    def _observe_attention(
        self, layer: int, weights: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> None:
        """Pass the attention of committed rows to the policy."""
        self.policy.text_length = self.store.length
        self.policy.observe_attention(layer, weights, query_positions, key_positions)

    def _observe_queries(self, layer: int, query_states: Tensor, positions: list[int]) -> None:
        """Pass the query states of prompt rows to the policy."""
        if fresh := self._fresh(self._queries_observed, layer, positions):
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

    def watch(self) -> Callable[[int], bool] | None:
        """By position, whether the policy wants a row's attention; None if it wants none."""
        if not isinstance(self.policy, ReadsAttention):
            return None
        return lambda position: self.policy.wants_attention(position, self.prompt)

    @property
    def prefill_chunk(self) -> int:
        """Tokens of the prompt after which the policy acts while it is read; 0 at the end of the prompt only."""
        return self.policy.prefill_chunk if isinstance(self.policy, ReadsInChunks) else 0

    def cut_layers(self) -> list[int]:
        """Layers before which the prompt is shortened."""
        return self.policy.cut_layers(self.store.depth) if isinstance(self.policy, CutsPrompt) else []

    def probe_texts(self, tokens: list[int], room: int) -> list[list[int]]:
        """Texts of at most `room` tokens the policy wants appended to the text and discarded, one after the other."""
        return self.policy.probe_texts(tokens, room) if isinstance(self.policy, ReadsProbes) else []

    def chunk_probe(self, prompt: list[int]) -> list[int]:
        """Tokens the policy wants appended to the part of the prompt that was read, and discarded."""
        return self.policy.chunk_probe(prompt, self.store.length) if isinstance(self.policy, ReadsInChunks) else []

    def logits_after_prompt(self) -> Tensor | None:
        """Logits [V] of the first generated token, if they are not those after the last prompt token."""
        return self.policy.logits_after_prompt() if isinstance(self.policy, AddsMemory) else None

    def select_prompt(self, layer: int) -> Tensor:
        """Which prompt tokens held by the layer before `layer` continue, bool [slots]. Later layers hold no others."""
        held = self._held(layer - 1, "prefill", self.prompt)
        selected = self.policy.select_prompt(held)
        selected = selected | (held.positions == self.prompt - 1)  # the last row gives the first token
        self.store.evict_from(layer, selected)
        return selected[0]

    def observe_probes(self) -> None:
        """Pass the attention of the probe tokens to the policy, without their attention to each other."""
        if not isinstance(self.policy, ReadsAttention):
            return
        for noted in self.store.attention:
            rows = self.store.length + on_device(noted.nodes, self.store.device)
            for layer, weights in noted.layers.items():
                slots = self.store.slots_of(layer)
                self._observe_attention(layer, weights[:, :, :slots.count], rows, slots.positions)

    def settle(self, moment: str, next_position: int, drafted: int = 0) -> list[Event]:
        """Let the policy act, and return the events that show the result.

        `drafted` is how many slots the draft tokens of the round took.
        """
        settled = self._settled(moment, next_position)
        self.store.memory_bytes = self._bytes_beside()
        events = self.recorder.cache(self.store, drafted, settled)
        if not self.policy:
            return events
        if LONG <= self.prompt >= self.store.length - 1:  # after the prefill, when most slots are evicted at once
            give_back()
        return [*events, *self.policy.explain(self.prompt, self.store.depth)]

    # --- one token after the other ---

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
                for part, buffers in (("keys", store.keys), ("values", store.values)) for layer in range(store.depth)
            )
        return policy.rests(max(slots.count for slots in store.slots) + added, length, self.prompt)

    def commit(self, node: int) -> None:
        """Append the path to a scratch node to the trunk, and let a policy that takes turns act between its tokens."""
        store = self.store
        if not (self.turns and self.turns.active) or node == -1:
            store.commit(node)
            return
        path = store.path(node)
        while path:
            if self.is_due:
                self._before.append(self._apply("keep", store.length))
            first, *others = path
            remaining = store.commit(first)
            path = [remaining.index(each) for each in others]

    def act_on(self, layer: int) -> None:
        """Let the policy act on one layer after a token was committed."""
        policy, store = self.policy, self.store
        policy.text_length = store.length
        if isinstance(policy, Quantises):
            store.quantise([layer], policy.quantise_count, self._encoder)
        held = self._held(layer, "keep", store.length)
        live = policy.retain_all([held])
        if isinstance(policy, Merges):
            self._merge(policy, held, live[0])
        store.evict(live)

    # --- acting ---

    def _settled(self, moment: str, next_position: int) -> Settled:
        """What the policy does now, together with what it did between the tokens of a commit."""
        if not self.policy or not self.store.length:  # another model may write the first tokens
            return Settled()
        if self.turns:
            self.turns.active = self.turns.active or moment != "chunk"
            if moment == "branch":  # each text has its own cache until one is chosen
                return Settled()
        before, self._before = self._before, []
        settled = [*before, self._apply(moment, next_position)]
        return combined(settled, lambda layer: self.store.slots_of(layer).positions)

    def _bytes_beside(self) -> int:
        """Memory of what a policy holds beside the slots, and of the caches of texts that are not committed."""
        own = self.policy.memory_bytes if isinstance(self.policy, AddsMemory) else 0
        return own + (self.turns.bytes() if self.turns else 0)

    def _apply(self, moment: str, next_position: int) -> Settled:
        """Evict, merge and quantise as the policy decides."""
        policy, store = self.policy, self.store
        policy.text_length = self._acted_at = store.length
        if isinstance(policy, Quantises):
            store.quantise(range(store.depth), policy.quantise_count, self._encoder)
        if policy.row_wise:
            next_row = on_device([[next_position]], store.device)
            return Settled(store.evict([policy.visible(next_row, slots.positions) for slots in store.slots]))
        held = [self._held(layer, moment, next_position) for layer in range(store.depth)]
        live = policy.retain_all(held)
        joined = []
        if isinstance(policy, Merges):
            joined = [self._merge(policy, layer, retained) for layer, retained in zip(held, live)]
        return Settled(store.evict(live), joined if any(joined) else [])

    def _merge(self, policy: Merges, held: Held, live: Tensor) -> MergedTokens | None:
        """Merge evicted slots of a layer into live ones; returns which, or None."""
        retained = (live & held.live).expand(self.store.heads, -1)
        evicted = held.live & ~retained
        merge = policy.merge(held, retained, evicted) if bool(evicted.any()) else None
        return self.store.merge(held.layer, *merge) if merge else None

    def _encoder(self, layer: int, part: str) -> Callable:
        return lambda rows, packed: self.policy.quantise_layer(layer, part, rows, packed)

    def _held(self, layer: int, moment: str, next_position: int) -> Held:
        store = self.store
        slots = store.slots_of(layer)

        def read(part: str) -> Tensor:
            return getattr(store, part)[layer].read(slots.count).to(store.device)

        def write(part: str, rows: Tensor) -> None:
            getattr(store, part)[layer].write(0, rows.to(store.device_of(layer)))

        return Held(layer, store.depth, moment, self.prompt, next_position, slots.positions, read, write)


def check_policy(policy: CachePolicy, store: KVCache, model: Model) -> None:
    """Raise Refusal if the policy cannot access the model's attention, or its layers cannot be split as it needs.
    """
    if not store.depth:
        raise Refusal(
            f"{model.name} has no attention layers, so {policy.title} has nothing to act on: remove {policy.title}.",
            policy.name,
        )
    reads = isinstance(policy, ReadsAttention | ReadsQueries | SelectsPerRow) or renumbers(policy)
    if not model.attends and (reads or not isinstance(policy, Quantises)):
        raise Refusal(
            f"The attention of {model.name} runs inside the transformers library, where {policy.title} can neither read"
            f" nor change it: remove {policy.title}, or choose another model.",
            policy.name,
        )
    _check_cuts(policy, model)
    _check_parts(policy, model)


def renumbers(policy: CachePolicy) -> bool:
    """Whether rows use their index in the cache as position."""
    return isinstance(policy, RenumbersPositions) and policy.renumbers_positions


def _check_parts(policy: CachePolicy, model: Model) -> None:
    """Raise Refusal if the policy computes with attention weights that this model does not give."""
    if isinstance(policy, ReadsParts) and model.parts is None:
        raise Refusal(
            f"{policy.title} computes with the attention weights, which works for llama, mistral, qwen2 and qwen3 "
            f"models that are not quantised: remove {policy.title}, or choose another model than {model.name}.",
            policy.name,
        )


def _check_cuts(policy: CachePolicy, model: Model) -> None:
    """Raise Refusal if the policy shortens the prompt for later layers and the model's layers cannot be split."""
    if isinstance(policy, CutsPrompt) and policy.cut_layers(model.depth) and not model.splits:
        raise Refusal(
            f"{_unsplittable(model)}, so {policy.title} cannot shorten the prompt for them: remove {policy.title}.",
            policy.name,
        )


def check_exits(parts: Iterable[Strategy], model: Model) -> None:
    """Raise Refusal if a strategy runs some layers alone and the model's layers cannot be split."""
    for part in parts:
        if part.exits_early and not model.splits:
            raise Refusal(
                f"{_unsplittable(model)}, so {part.title} cannot run some layers alone: choose another drafter or "
                "another model.",
                part.name,
            )


def _unsplittable(model: Model) -> str:
    if model.recurrence:
        return f"Recurrent layers of {model.name} need the states of all tokens"
    return f"Later layers of {model.name} use what earlier ones computed"
