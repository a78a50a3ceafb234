"""Products of rows with keys, before anything is scaled or hidden."""
from __future__ import annotations

from torch import Tensor

FEW = 4  # rows


def products(rows: Tensor, keys: Tensor) -> Tensor:
    """Of rows [kv_heads, n, d] with keys [kv_heads, m, d], [kv_heads, n, m]. A few rows are sooner carried past the
    keys than the keys past them.
    """
    return (keys @ rows.mT).mT if rows.shape[1] <= FEW else rows @ keys.mT
