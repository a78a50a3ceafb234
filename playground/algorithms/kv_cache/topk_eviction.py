"""Eviction of the slots with the lowest scores, the base classes of policies that differ only in their scores."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import top_slots
from playground.contract import CachePolicy, knob
from playground.engine.attention.attention_mask import EMPTY
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import Held


class RanksSlots(CachePolicy):
    """Retains the `recent` latest tokens of every head, and those with the largest scores up to its budget."""

    guarantee = ("budget_respected", "collapses")

    if TYPE_CHECKING:
        recent: int

    def scores(self, held: Held) -> Tensor:
        """Score of each slot, [kv_heads, slots]; the lowest are evicted."""
        raise NotImplementedError

    def evicting(self, held: Held, stays: Tensor) -> None:
        """Called for each layer before the slots that do not stay are evicted; bool [kv_heads, slots], true also for
        some that are empty.
        """

    def retain(self, held: Held) -> Tensor:
        return self.retain_all([held])[0]

    def retain_all(self, held: Sequence[Held]) -> list[Tensor]:
        """Rank all layers at once if they have equally many slots: a GPU takes as long for all as for one."""
        if len({layer.positions.shape[1] for layer in held}) > 1:
            return super().retain_all(held)
        scores = [self.scores(layer) for layer in held]
        positions = torch.cat([layer.positions.expand_as(each) for layer, each in zip(held, scores)])
        recent = positions >= held[0].next - self.recent
        ranked = top_slots(torch.cat(scores), self.budget(0) - self.recent, (positions != EMPTY) & ~recent)
        retained = list((recent | ranked).split([len(each) for each in scores]))
        for layer, stays in zip(held, retained):
            self.evicting(layer, stays)
        return retained

    def rests(self, slots: int, length: int, prompt: int) -> bool:
        return slots <= self.budget(0)


class TopKEviction(RanksSlots):
    """Retains the `recent` latest tokens per layer and KV head and those with the largest scores, `size` in all."""

    size: int = knob(64, 1, 2048, step=1, help="tokens retained, recent ones included")
    recent: int = knob(0, 0, 1024, step=1, help="most recent tokens, always retained")

    def check(self):
        if self.recent > self.size:
            raise Refusal(f"recent is {self.recent} and only {self.size} tokens are retained: raise size.", "size")

    @classmethod
    def knobs_for_budget(cls, tokens: int, prompt: int) -> dict[str, int]:
        return {"size": tokens}

    def budget(self, generated: int) -> int:
        return self.size
