"""What heads of a layer retain together: budgets they compete for, and chunks that are retained as a whole.

Budgets: Feng et al. 2024, arXiv 2407.11550; chunks: Liu et al. 2025, arXiv 2502.00299.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from playground.algorithms.kv_cache.attention_scores import top_slots
from playground.algorithms.kv_cache.prompt_compression import PromptCompression
from playground.errors import Refusal
from playground.events import Event, Figure

if TYPE_CHECKING:
    from playground.contract import Held


class InChunks(PromptCompression):
    """Retains whole chunks of neighbouring tokens, whose number is the policy's knob `chunk`."""

    @classmethod
    def knobs_for_budget(cls, tokens: int, prompt: int) -> dict[str, int]:
        knobs = super().knobs_for_budget(tokens, prompt)
        return {**knobs, "chunk": min(cls.chunk, tokens - knobs["window"])}

    def check(self) -> None:
        super().check()
        if not self.chunks:
            raise Refusal(
                f"capacity leaves {self.capacity - self.window} tokens before the window, less than a chunk of "
                f"{self.chunk}: raise capacity.",
                "capacity",
            )

    @property
    def chunks(self) -> int:
        """Chunks before the window that a head retains, or all of them on average."""
        return (self.capacity - self.window) // self.chunk

    def share(self, held: Held) -> int:
        return self.chunks * self.chunk


class SharedBudgets(PromptCompression):
    """The heads of a layer compete for one budget, and the lane shows what each of them retained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kept: dict[int, list[int]] = {}  # by layer, tokens of each head, until they are shown

    def note_kept(self, layer: int, kept: Tensor) -> Tensor:
        """The slots that a layer retains, bool [kv_heads, slots], counted when they are first chosen."""
        self._kept.setdefault(layer, kept.sum(-1).tolist())
        return kept

    def explain(self, prompt: int, layers: int) -> Iterator[Event]:
        for layer, counts in sorted(self._kept.items()):
            labels = [f"head {head}" for head in range(len(counts))]
            yield Figure("bars", f"prompt tokens kept, layer {layer}", {"labels": labels, "values": counts})
        self._kept = {layer: [] for layer in self._kept}

    def expected_share(self, full) -> float:
        return min(1.0, (self.capacity + full.generated) / full.length)


def shared_out(scores: Tensor, eligible: Tensor, even: int, alpha: float) -> Tensor:
    """Which of the `eligible` are chosen, bool, all [heads, n]: `even` per head on average.

    Each head takes a share alpha of an even budget by its own scores; the rest goes to the best of all heads.
    """
    own = top_slots(scores, int(alpha * even), eligible)
    rest = even * len(scores) - int(own.sum())
    best = top_slots(scores.flatten()[None], rest, (eligible & ~own).flatten()[None])
    return own | best.view_as(own)


def chunk_means(scores: Tensor, number: Tensor, eligible: Tensor) -> tuple[Tensor, Tensor]:
    """Mean score of the eligible slots of each chunk, [heads, chunks], and which chunks have any.

    `scores` and `eligible` are [heads, slots]; `number` [heads, slots] is the chunk of each slot.
    """
    sums, counts = (
        scores.new_zeros(len(scores), int(number.max()) + 1).scatter_add(1, number, each * eligible)
        for each in (scores, torch.ones_like(scores))
    )
    return sums / counts.clamp(min=1), counts > 0
