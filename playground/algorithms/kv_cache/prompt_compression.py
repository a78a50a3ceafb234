"""The end of a prompt votes on the rest of it, and the prompt is cut once; what methods that do so have in common."""
from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from playground.algorithms.kv_cache.attention_scores import Votes, heaviest
from playground.contract import CachePolicy, knob
from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import Held

POOLS = {"avg": avg_pool1d, "max": max_pool1d}


def check_kernel(kernel: int) -> None:
    """Refuse to pool over neighbours that have no middle."""
    if kernel % 2 == 0:
        raise Refusal(f"kernel must be odd to have a middle, not {kernel}: take {kernel + 1}.", "kernel")


class Snapshot(CachePolicy):
    """The last `window` tokens of the prompt vote and stay; `share` says how many of those before them stay in a layer.
    """

    row_wise, watches = False, True

    window: int = knob(16, 1, 128, step=1, help="last tokens of the prompt, which vote and stay")
    capacity: int = knob(64, 2, 2048, step=1, help="tokens of the prompt that stay, the window included")
    kernel: int = knob(
        5, 1, 15, step=2, help="neighbouring tokens whose votes are pooled, an odd number; 1 pools nothing"
    )
    pooling: str = knob("avg", choices=("avg", "max"), help="how votes of neighbours are pooled")

    def __post_init__(self):
        self.votes = Votes()

    def check(self):
        if self.capacity <= self.window:
            raise Refusal(
                f"capacity is {self.capacity} and the window alone takes {self.window}: raise capacity above it.",
                "capacity",
            )
        check_kernel(self.kernel)

    @classmethod
    def holding(cls, tokens: int, prompt: int) -> dict[str, int]:
        return {"capacity": tokens, "window": min(cls.window, tokens // 2)}

    def share(self, held: Held) -> int:
        """How many tokens before the window stay in a layer."""
        raise NotImplementedError

    def wants(self, position: int, prompt: int) -> bool:
        return prompt - self.window <= position < prompt

    def attended(self, layer: int, weights: Tensor, queries: Tensor, keys: Tensor) -> None:
        self.votes.add(layer, weights, keys)

    def retain(self, held: Held) -> Tensor:
        if held.next < held.prompt:
            return held.live
        late = held.positions >= held.prompt - self.window
        early = held.live & ~late  # once they have been cut there are no more of them than may stay, so all of them do
        return late | heaviest(self._pooled(held, late), self.share(held), early)

    def _pooled(self, held: Held, late: Tensor) -> Tensor:
        """Votes before the window, smoothed along the text, [kv_heads, slots]; those of the window are left out."""
        votes = self.votes.of(held.layer, held.positions).masked_fill(late, 0)
        return POOLS[self.pooling](votes, self.kernel, 1, self.kernel // 2)
