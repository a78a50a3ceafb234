"""Eviction of the tokens that received the least attention, the base class of H2O and of what is built on it."""
from __future__ import annotations

from typing import TYPE_CHECKING, Self

from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import AttentionScores
from playground.algorithms.kv_cache.topk_eviction import RanksSlots
from playground.contract import DecidesByHead, ReadsAttention, knob
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import Held


class HeavyHitters(ReadsAttention, RanksSlots, DecidesByHead):
    """Retains the `heavy` tokens that received the most attention so far and the `recent` latest, per layer and KV
    head. Zhang et al. 2023, arXiv 2306.14048.
    """

    heavy: int = knob(32, 0, 1024, step=1, help="tokens that stay because they received the most attention")
    recent: int = knob(32, 0, 1024, step=1, help="most recent tokens that always stay")

    def __post_init__(self) -> None:
        self.attention = AttentionScores()

    def check(self) -> None:
        if self.heavy + self.recent == 0:
            raise Refusal("heavy and recent are both 0, so no token stays: raise one of them.", "recent")

    @classmethod
    def knobs_for_budget(cls, tokens: int, prompt: int) -> dict[str, int]:
        return {"heavy": tokens // 2, "recent": tokens - tokens // 2}

    def budget(self, generated: int) -> int:
        return self.heavy + self.recent

    def observe_attention(self, layer: int, weights: Tensor, query_positions: Tensor, key_positions: Tensor) -> None:
        self.attention.add(layer, weights, key_positions, self.text_length)

    def scores(self, held: Held) -> Tensor:
        return self.attention.of(held.layer, held.positions, held.next)

    def for_heads(self, layer: int, heads: Tensor) -> Self:
        alone = super().for_heads(layer, heads)
        alone.attention = self.attention.for_heads(layer, heads)
        return alone
