"""Prompt compression: the attention of the last prompt tokens selects which of the earlier ones are retained."""
from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from playground.algorithms.kv_cache.attention_scores import AttentionScores, top_slots
from playground.contract import ReadsAttention, knob
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import Held

POOLS = {"avg": avg_pool1d, "max": max_pool1d}


def check_kernel(kernel: int) -> None:
    """Raise Refusal if a pooling kernel is even."""
    if kernel % 2 == 0:
        raise Refusal(f"kernel must be odd, not {kernel}: take {kernel + 1}.", "kernel")


class PromptCompression(ReadsAttention):
    """Retains the last `window` prompt tokens and the `share` earlier ones that receive most of their attention."""

    prompt_only = True

    window: int = knob(16, 1, 128, step=1, help="last tokens of the prompt, whose attention selects; all retained")
    capacity: int = knob(64, 2, 2048, step=1, help="prompt tokens retained, the window included")
    kernel: int = knob(
        5, 1, 15, step=2, help="neighbouring tokens whose scores are pooled, an odd number; 1 pools nothing"
    )
    pooling: str = knob("avg", choices=("avg", "max"), help="how scores of neighbours are pooled")

    def __post_init__(self):
        self.attention = AttentionScores()

    def check(self):
        if self.capacity <= self.window:
            raise Refusal(
                f"capacity is {self.capacity} and the window takes {self.window}: raise capacity above it.",
                "capacity",
            )
        check_kernel(self.kernel)

    @classmethod
    def knobs_for_budget(cls, tokens: int, prompt: int) -> dict[str, int]:
        return {"capacity": tokens, "window": min(cls.window, tokens // 2)}

    def share(self, held: Held) -> int:
        """Number of tokens before the window that a layer retains."""
        raise NotImplementedError

    def wants_attention(self, position: int, prompt: int) -> bool:
        return prompt - self.window <= position < prompt

    def observe_attention(self, layer: int, weights: Tensor, query_positions: Tensor, key_positions: Tensor) -> None:
        self.attention.add(layer, weights, key_positions, self.text_length)

    def retain(self, held: Held) -> Tensor:
        if held.next < held.prompt:
            return held.live
        late = held.positions >= held.prompt - self.window
        early = held.live & ~late  # after the first eviction no more than `share` are left, so all of them stay
        return late | top_slots(self._pooled(held, late), self.share(held), early)

    def _pooled(self, held: Held, late: Tensor) -> Tensor:
        """Scores before the window, pooled along the text, [kv_heads, slots]; those of the window are left out."""
        scores = self.attention.of(held.layer, held.positions, held.next).masked_fill(late, 0)
        return POOLS[self.pooling](scores, self.kernel, 1, self.kernel // 2)
