"""Cache policies that store states in another form: merged, quantised, or summarised beside the slots."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from playground.contract.cache_policy.base_policy import CachePolicy

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract.cache_policy.held import Full, Held
    from playground.engine.attention.cascade_attention import PartialAttention
    from playground.engine.cache.kv_buffer import MergeMap, QuantisedRows


class Merge(NamedTuple):
    """Which slots of one layer are merged into which, and with what weights."""

    merge_map: MergeMap
    source_weights: Tensor  # weight of each slot that is merged away, [m]
    target_weights: Tensor  # weight of each slot that others are merged into, [k]


class Merges(CachePolicy, capability=True):
    """Merges evicted slots into live ones."""

    def merge(self, held: Held, stays: Tensor, goes: Tensor) -> Merge | None:
        """Which of the evicted slots are merged into which of the live ones, both bool [kv_heads, slots].

        Called before eviction if any slot is evicted; None merges nothing.
        """
        raise NotImplementedError


class Quantises(CachePolicy, capability=True):
    """Stores the oldest slots in fewer bits, irreversibly; unless it implements `retain`, none is evicted.

    It is not row-wise: which tokens a position reads in full precision depends on when they were committed.
    """

    def retain(self, held: Held) -> Tensor:
        return held.live

    def quantises_layer(self, layer: int, layers: int) -> bool:
        """Whether it quantises slots of this of so many layers at all."""
        return True

    def quantise_count(self, part: str, exact: int) -> int:
        """How many of the oldest rows of "keys" or "values" are quantised now, of `exact` rows in full precision."""
        raise NotImplementedError

    def quantise(self, part: str, rows: Tensor, packed: QuantisedRows | None) -> QuantisedRows:
        """Quantise rows [kv_heads, n, head_dim], together with those quantised before them."""
        raise NotImplementedError

    def quantise_layer(self, layer: int, part: str, rows: Tensor, packed: QuantisedRows | None) -> QuantisedRows:
        """`quantise` for the slots of one layer; override it if layers are quantised differently.

        Nothing is evicted, so the position of a row is its index in the cache.
        """
        return self.quantise(part, rows, packed)

    def quantised_bits(self, part: str, full: Full) -> float:
        """Bits per quantised number of "keys" or "values", with its share of scales and other metadata."""
        raise NotImplementedError

    def expected_share(self, full: Full) -> float:
        share = sum(self._packed_share(part, full) for part in ("keys", "values")) / 2
        quantised = sum(self.quantises_layer(layer, full.layers) for layer in range(full.layers)) / full.layers
        return 1 - quantised * (1 - share)

    def _packed_share(self, part: str, full: Full) -> float:
        packed = self.quantise_count(part, full.length) / full.length
        return 1 - packed + packed * self.quantised_bits(part, full) / full.bits


class AddsMemory(CachePolicy, capability=True):
    """Holds states beside the slots, to which rows attend, too."""

    def attend_memory(
        self, layer: int, query_states: Tensor, query_positions: list[int], seen: PartialAttention
    ) -> Tensor:
        """Attention of rows over the slots and over what the policy holds beside them, [heads, n, d].

        Query states are [heads, n, d]; `seen` is their attention over the slots alone. The model is one whose
        attention is a plain softmax.
        """
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        """Memory of what it holds beside the slots."""
        raise NotImplementedError

    def logits_after_prompt(self) -> Tensor | None:
        """Logits [V] of the first generated token, if not those after the last prompt token."""
        return None
