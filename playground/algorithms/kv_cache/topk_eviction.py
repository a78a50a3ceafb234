"""Top-k eviction, the base class of baselines that differ only in their scores."""
from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import top_slots
from playground.contract import CachePolicy, knob
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import Held


class TopKEviction(CachePolicy):
    """Retains the `recent` latest tokens per layer and KV head and those with the largest scores, `size` in all."""

    guarantee = ("budget_respected", "collapses")

    size: int = knob(64, 1, 2048, step=1, help="tokens retained, recent ones included")
    recent: int = knob(0, 0, 1024, step=1, help="most recent tokens, always retained")

    def check(self):
        if self.recent > self.size:
            raise Refusal(f"recent is {self.recent} and only {self.size} tokens are retained: raise size.", "size")

    @classmethod
    def knobs_for_budget(cls, tokens: int, prompt: int) -> dict[str, int]:
        return {"size": tokens}

    def scores(self, held: Held) -> Tensor:
        """Score of each slot, [kv_heads, slots]; the lowest are evicted."""
        raise NotImplementedError

    def retain(self, held: Held) -> Tensor:
        recent = held.positions >= held.next - self.recent
        return recent | top_slots(self.scores(held), self.size - self.recent, held.live & ~recent)

    def rests(self, slots: int, length: int, prompt: int) -> bool:
        return slots <= self.size

    def budget(self, generated: int) -> int:
        return self.size
