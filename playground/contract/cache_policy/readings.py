"""Cache policies that read more than slots: attention, queries, further tokens, weights of the network."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING

from playground.contract.cache_policy.base_policy import CachePolicy

if TYPE_CHECKING:
    from torch import Tensor

    from playground.engine.attention.attention_parts import AttentionParts


class ReadsAttention(CachePolicy, capability=True):
    """Reads the attention of committed rows."""

    def wants_attention(self, position: int, prompt: int) -> bool:
        """Whether `observe_attention` should receive the row at `position`; `prompt` is the prompt length in tokens."""
        return True

    def observe_attention(self, layer: int, weights: Tensor, query_positions: Tensor, key_positions: Tensor) -> None:
        """Receive the attention of committed rows.

        `weights` [kv_heads, n, m] are summed over the query heads of a group, for query positions [n] over key
        positions [1 or kv_heads, m]; a negative key position marks an empty slot, which has no weight.
        """
        raise NotImplementedError


class ReadsQueryHeads(ReadsAttention, capability=True):
    """Reads the attention of the prompt by query head, too."""

    def observe_query_heads(self, layer: int, weights: Tensor) -> None:
        """Receive the attention of the next rows of the prompt by query head, [kv_heads, group, n, tokens so far].

        Only if every row of the prompt is wanted by `wants_attention` and nothing is evicted before its end.
        """
        raise NotImplementedError


class ReadsQueries(CachePolicy, capability=True):
    """Reads the query states of the prompt."""

    def observe_queries(self, layer: int, query_states: Tensor) -> None:
        """Receive the query states of the next rows of the prompt, [kv_heads, group, n, head_dim]."""
        raise NotImplementedError


class ReadsProbes(CachePolicy, capability=True):
    """Has further texts read after the prompt and discarded: what they attend to is worth keeping.

    If it also derives from `ReadsAttention`, `observe_attention` receives their attention, without that to each other.
    """

    if TYPE_CHECKING:  # set before the run; without an annotation at run time, which would make it a knob
        spell: Callable[[str], list[int]] = field(init=False)  # text to token ids
    else:
        spell = staticmethod(lambda text: [])

    def probe_texts(self, text: list[int], room: int) -> list[list[int]]:
        """The texts, of at most `room` tokens each; every one is appended to the prompt and discarded."""
        raise NotImplementedError


class ReadsProbeHeads(ReadsProbes, capability=True):
    """Reads the attention of these texts by query head."""

    def observe_probe_heads(self, layer: int, weights: Tensor) -> None:
        """Receive the attention of the next rows of probe texts by query head, [kv_heads, group, n, tokens before].

        Without their attention to each other.
        """
        raise NotImplementedError


class ReadsLayerInputs(CachePolicy, capability=True):
    """Reads the hidden states that enter each layer, for every committed token."""

    def state_layers(self, depth: int) -> tuple[int, ...]:
        return tuple(range(depth))

    def observe_layer_inputs(self, first: int, inputs: dict[int, Tensor]) -> None:
        """Receive the inputs [n, hidden_size] of these layers, by layer, for the tokens from position `first` on.

        They come with the forward that reads the tokens. Tokens that are drafted are received once they are committed,
        so a copy of the policy that acts between them does not know their states.
        """
        raise NotImplementedError


class ReadsParts(CachePolicy, capability=True):
    """Computes with the target's attention weights and rotary embedding; models that do not give them are refused."""

    def begin(self, parts: AttentionParts) -> None:
        """Before the run. Raises Refusal if the knobs do not fit the target."""
        raise NotImplementedError
