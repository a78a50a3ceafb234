"""Layer contrasts by their formula."""
from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor


def contrasted(logp: list[float], weaker: list[float], share: float) -> int:
    """The token with the largest difference among those with at least this share of the best one's probability."""
    return max(
        (v for v in range(len(logp)) if math.exp(logp[v]) >= share * math.exp(max(logp))),
        key=lambda v: logp[v] - weaker[v],
    )


LN2 = math.log(2)
Reads = Callable[[list[int]], Tensor]  # log-probabilities [V] after a text


def mixed_text(reads: Reads, prompts: tuple[list[int], list[int]], length: int, alpha: Callable) -> list[int]:
    new = []
    for _ in range(length):
        z1, z2 = (reads(prompt + new) for prompt in prompts)
        strength = alpha(z1, z2)
        new.append(int(((1 + strength) * z1 - strength * z2).argmax()))
    return new
