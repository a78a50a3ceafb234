"""A fixed number of tokens stays, some of the latest among them; what baselines that differ in nothing but their scores
have in common.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import heaviest
from playground.contract import CachePolicy, knob
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import Held


class TopKEviction(CachePolicy):
    """In each layer and KV head the `recent` latest tokens stay, and of the others those with the largest `scores`, up
    to `size` in all.
    """

    guarantee = ("budget_respected", "collapses")
    row_wise = False

    size: int = knob(64, 1, 2048, step=1, help="tokens that stay, recent ones included")
    recent: int = knob(0, 0, 1024, step=1, help="most recent tokens that stay in any case")

    def check(self):
        if self.recent > self.size:
            raise Refusal(f"recent is {self.recent} and only {self.size} tokens stay: raise size.", "size")

    @classmethod
    def holding(cls, tokens: int, prompt: int) -> dict[str, int]:
        return {"size": tokens}

    def scores(self, held: Held) -> Tensor:
        """What each slot is worth, [kv_heads, slots]."""
        raise NotImplementedError

    def retain(self, held: Held) -> Tensor:
        recent = held.positions >= held.next - self.recent
        return recent | heaviest(self.scores(held), self.size - self.recent, held.live & ~recent)

    def budget(self, generated: int) -> int:
        return self.size
