"""Learnt states before the text: every row attends to them, and they belong to no token.

They stand at the positions -n, ..., -1, so that the text keeps its own. Rotary embeddings depend on distances alone,
and the result is that of a prefix at 0, ..., n - 1 before a text that starts at n.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from playground.algorithms.kv_cache.states_beside_slots import attend_also
from playground.contract import AddsMemory, Held, ReadsParts
from playground.events import Event, Figure

if TYPE_CHECKING:
    from playground.algorithms.differentiable_llama import DifferentiableLlama
    from playground.contract import Full
    from playground.engine.attention.attention_parts import AttentionParts
    from playground.engine.attention.cascade_attention import PartialAttention

States = Sequence[tuple[Tensor, Tensor]]
"""By layer, key and value states of n positions before the text, [kv_heads, n, head_dim], keys rotated."""

TOGETHER = 16  # texts that are measured in one forward


class AttendsPrefix(ReadsParts, AddsMemory):
    """All rows attend to a prefix beside the slots; without one, attention is as it was."""

    shown = "attention to the prefix"  # title of the figure

    def __post_init__(self):
        self.states: States = ()
        self._shares: dict[int, float] = {}  # of the prefix in the attention of the last row, by layer
        self._written = 0  # tokens after the prompt

    @property
    def vectors(self) -> int:
        """Positions of the prefix."""
        return self.states[0][0].shape[1] if self.states else 0

    @property
    def memory_bytes(self) -> int:
        return sum(states.nbytes for layer in self.states for states in layer)

    def expected_share(self, full: Full) -> float:
        return 1.0 + self.vectors / full.length

    def retain_all(self, held: Sequence[Held]) -> list[Tensor]:
        self._written = held[0].next - held[0].prompt
        return [layer.live for layer in held]

    def rests(self, slots: int, length: int, prompt: int) -> bool:
        return True

    def attend_memory(
        self, layer: int, query_states: Tensor, query_positions: list[int], seen: PartialAttention
    ) -> Tensor:
        if not self.states:
            return seen.out
        out, share = attend_also(query_states, *self.states[layer], seen)
        self._shares[layer] = float(share[:, -1].mean())
        return out

    def explain(self, prompt: int, layers: int) -> Iterator[Event]:
        if self._shares:
            series = {f"layer {layer}": share for layer, share in sorted(self._shares.items())}
            yield Figure("scalar", self.shown, {"x": self._written, "series": series})
        self._shares = {}


def states_before(network: DifferentiableLlama, parts: AttentionParts, inputs: Tensor) -> States:
    """What the network computes of input embeddings [n, width] that stand before the text."""
    found: list[tuple[Tensor, Tensor]] = []
    back = torch.full((len(inputs),), len(inputs), device=inputs.device)

    def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found.append((parts.rotate_back(keys, back), values))
        return network.attend(query, keys, values)

    network(inputs, torch.arange(len(inputs), device=inputs.device), attend)
    return found


def after_inputs(network: DifferentiableLlama, inputs: Tensor, ids: Tensor) -> Tensor:
    """Logits [texts, m, V] after each token of padded texts [texts, m] that follow input embeddings [n, width]."""
    hidden = torch.cat([inputs.expand(len(ids), -1, -1), network.embed(ids)], 1)
    rows = network(hidden, torch.arange(hidden.shape[1], device=ids.device), network.attend_causally)
    return network.logits(rows[:, len(inputs):])


def after_states(network: DifferentiableLlama, prefix: States, ids: Tensor) -> Tensor:
    """The same after a prefix of states, or after none, [texts, m, V]."""

    def attend(layer: int, query: Tensor, *own: Tensor) -> Tensor:
        if not prefix:
            return network.attend(query, *own)
        keys, values = (torch.cat([before.expand(len(ids), -1, -1, -1), each], -2)
                        for before, each in zip(prefix[layer], own))
        return network.attend(query, keys, values)

    rows = network(network.embed(ids), torch.arange(ids.shape[1], device=ids.device), attend)
    return network.logits(rows)


def padded(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Texts as token ids [texts, m], and which of these are real, bool [texts, m]."""
    rows = [torch.tensor(ids) for ids in texts]
    real = pad_sequence([torch.ones(len(ids), dtype=torch.bool) for ids in rows], batch_first=True)
    return pad_sequence(rows, batch_first=True), real


def next_token_losses(logits: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """-log p of every real token after the first, in nats, one after the other, of logits [texts, m, V]."""
    counts = real[:, 1:]
    return cross_entropy(logits[:, :-1][counts], ids[:, 1:][counts], reduction="none")


@torch.no_grad()
def mean_loss(network: DifferentiableLlama, inputs: Tensor, texts: Sequence[Sequence[int]]) -> float:
    """Mean -log p of the tokens of texts that follow input embeddings [n, width], in nats; their first do not count."""
    found = []
    for first in range(0, len(texts), TOGETHER):
        ids, real = padded(texts[first:first + TOGETHER])
        found.append(next_token_losses(after_inputs(network, inputs, ids), ids, real))
    return float(torch.cat(found).mean())
