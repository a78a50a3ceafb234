"""Layer contrasts by their formula."""
from __future__ import annotations

import math


def contrasted(logp: list[float], weaker: list[float], share: float) -> int:
    """The token with the largest difference among those with at least this share of the best one's probability."""
    return max(
        (v for v in range(len(logp)) if math.exp(logp[v]) >= share * math.exp(max(logp))),
        key=lambda v: logp[v] - weaker[v],
    )
