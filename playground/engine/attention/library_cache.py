"""Runs architectures whose attention the playground's own function cannot replace, with the library's own attention.

The model gets a `Cache` of the library that reads and writes the KV cache of a lane. To the model, every row continues
one straight text: a tree is fed branch by branch, and each branch sees only its ancestors. Thus the library's masks,
windows and positions hold whatever they depend on. Attention weights and masks of cache policies are out of reach.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from typing import Self

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from playground.engine.attention.segment_attention import Segment
from playground.engine.hooks import Call, LayerPlan, running
from playground.errors import Refusal


class LibraryCache(DynamicCache):
    """What the library sees of one branch: a cache with the tokens before it."""

    def __init__(self, branch: Segment):
        super().__init__()
        self.layer_class_to_replicate = None
        self.layers = LibraryLayer.all_of(branch)


class LibraryLayer(DynamicLayer):
    """One layer of it."""

    def __init__(self, branch: Segment, layer: int, ancestors: Tensor | None):
        super().__init__()
        self.branch, self.layer, self.ancestors, self.seen = branch, layer, ancestors, 0
        self.is_initialized = True

    @classmethod
    def all_of(cls, branch: Segment) -> list[Self]:
        """A layer for every decoder layer."""
        ancestors = _ancestors(branch)
        return [cls(branch, layer, ancestors) for layer in range(branch.store.depth)]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the new states [1, kv_heads, rows, d]; returns those of all ancestors and of the rows themselves."""
        keys, values = self.branch.write(self.layer, key_states[0], value_states[0])
        if self.ancestors is not None:
            ancestors = self.ancestors.to(keys.device)
            keys, values = keys[:, ancestors], values[:, ancestors]
        self.seen = self.branch.rows
        return keys[None], values[None]

    def get_seq_length(self) -> int:
        """Tokens before the branch; once the layer has read the branch, those of the branch too."""
        return self.branch.positions[0] + self.seen


class LibraryAttention:
    """Forwards of a network with the library's own attention, a branch at a time.

    Some architectures read several tokens at once only at the start of a text; they get the others one by one.
    """

    def __init__(self, network: PreTrainedModel, one_by_one: bool):
        self.network, self.one_by_one = network, one_by_one

    def __call__(
        self, segments: list[Segment], plan: LayerPlan, captured: dict[int, Tensor], **inputs: Tensor
    ) -> Tensor:
        """Logits [rows, V] of all rows. Raises Refusal for what needs the playground's own attention."""
        logits, parts, start = [], [], 0
        for segment in segments:
            check_unwatched(segment)
            for branch in branches(segment, self.one_by_one):
                rows = slice(start, start + branch.rows)
                call = Call([branch], _rows_of(plan, rows))
                logits.append(self._read(branch, call, {name: given[:, rows] for name, given in inputs.items()}))
                parts.append(call.captured)
                start += branch.rows
        captured.update({layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]})
        return torch.cat(logits)

    def _read(self, branch: Segment, call: Call, inputs: dict[str, Tensor]) -> Tensor:
        inputs |= positions_given(self.network, branch.positions[0], branch.rows)
        with running(call):
            return self.network(**inputs, past_key_values=LibraryCache(branch), use_cache=True).logits[0]


def positions_given(network: PreTrainedModel, start: int, rows: int) -> dict[str, Tensor]:
    """The position_ids that the library's `generate` passes, to networks that take them.

    Without them, RoBERTa and its relatives count from another number.
    """
    if "position_ids" not in signature(network.forward).parameters:
        return {}
    device = network.get_input_embeddings().weight.device
    return {"position_ids": torch.arange(start, start + rows, device=device)[None]}


def branches(segment: Segment, one_by_one: bool = False) -> Iterator[Segment]:
    """The rows of a segment as chains, each as long as a row follows the one before it.

    With `one_by_one`, chains after the start of the text are single rows.
    """
    parents, first = segment.store.parents, segment.first
    for row in range(segment.first + 1, segment.end):
        if parents[row] != row - 1 or one_by_one and (first or segment.store.length):
            yield Segment(segment.store, first, row - first)
            first = row
    yield Segment(segment.store, first, segment.end - first)


def _ancestors(branch: Segment) -> Tensor | None:
    """The slots that a branch sees, its own included; None if it sees all slots before it."""
    line = branch.store.lineage[branch.end - 1]
    seen = [node for node in range(branch.end) if line >> node & 1]
    if len(seen) == branch.end:
        return None
    trunk = range(branch.store.length)
    return torch.tensor([*trunk, *(branch.store.length + node for node in seen)], device=branch.store.device)


def _rows_of(plan: LayerPlan, rows: slice) -> LayerPlan:
    return replace(plan, resume=(plan.resume[0], plan.resume[1][rows])) if plan.resume else plan


def check_unwatched(segment: Segment) -> None:
    """Raise Refusal if something else than the library is to read or change the attention of a segment."""
    store = segment.store
    held = len(store.slots) == 1 and store.slots[0].dense and store.slots[0].count == store.length
    if segment.watched or segment.needs_keys or store.window or not held:
        raise Refusal(
            "This model's attention runs inside the transformers library, where the playground can neither read its "
            "weights nor change its mask: choose another model, or another strategy.",
            "model",
        )
