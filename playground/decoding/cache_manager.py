"""When a lane's cache policy acts on the target's KV cache: after the prefill, and after every commit."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from playground.contract import (
    AddsMemory,
    CachePolicy,
    CutsPrompt,
    Quantises,
    ReadsAttention,
    ReadsInChunks,
    ReadsParts,
    ReadsProbes,
    ReadsQueries,
    SelectsPerRow,
    Strategy,
)
from playground.decoding.acting_policy import ActingPolicy
from playground.decoding.policy_connection import RotateBack, renumbers
from playground.decoding.recorder import Recorder, Settled, combined
from playground.decoding.rows_in_turn import RowsInTurn
from playground.engine.heap_memory import give_back
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.decoding.committed_states import CommittedStates
    from playground.engine.cache.kv_cache import KVCache
    from playground.engine.model import Model
    from playground.events import Event

LONG = 1024  # prompt length, in tokens, from which returning evicted memory to the system is worth its milliseconds


class CacheManager:
    """Says when a cache policy acts on one KV cache, and records what it did; or, without a policy, the cache alone."""

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
        self.acting = ActingPolicy(policy, store, prompt, rotate_back) if policy else None
        self.turns: RowsInTurn | None = None  # of a policy that acts between the rows of a forward
        self._before: list[Settled] = []  # what it did between the tokens of a commit

    def take_turns(self) -> None:
        """Let the policy, if there is one, act between the rows of a forward, as it does when each is read alone."""
        if self.acting:
            self.turns = self.store.in_turn = RowsInTurn(self.acting)

    def watch(self) -> Callable[[int], bool] | None:
        """By position, whether the policy wants a row's attention; None if it wants none."""
        return self.acting.watch() if self.acting else None

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

    def observe_states(self, states: CommittedStates) -> None:
        """Pass the hidden states of committed tokens to a policy that reads them."""
        if self.acting:
            self.acting.connection.observe_states(states)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, probe tokens are read; at the end the policy, if there is one, receives their attention."""
        connection = self.acting.connection if self.acting else None
        if connection:
            connection.rehearsing = True
        yield
        if connection:
            connection.rehearsing = False
            connection.observe_probes()

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

    def commit(self, node: int) -> None:
        """Append the path to a scratch node to the trunk, and let a policy that takes turns act between its tokens."""
        store, acting = self.store, self.acting
        if not (acting and self.turns and self.turns.active) or node == -1:
            store.commit(node)
            return
        path = store.path(node)
        while path:
            if acting.is_due:
                self._before.append(acting.act("keep", store.length))
            first, *others = path
            remaining = store.commit(first)
            path = [remaining.index(each) for each in others]

    def _settled(self, moment: str, next_position: int) -> Settled:
        """What the policy does now, together with what it did between the tokens of a commit."""
        if not self.acting or not self.store.length:  # another model may write the first tokens
            return Settled()
        if self.turns:
            self.turns.active = self.turns.active or moment != "chunk"
            if moment == "branch":  # each text has its own cache until one is chosen
                return Settled()
        before, self._before = self._before, []
        settled = [*before, self.acting.act(moment, next_position)]
        return combined(settled, lambda layer: self.store.slots_of(layer).positions)

    def _bytes_beside(self) -> int:
        """Memory of what a policy holds beside the slots, and of the caches of texts that are not committed."""
        own = self.policy.memory_bytes if isinstance(self.policy, AddsMemory) else 0
        return own + (self.turns.bytes() if self.turns else 0)


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
