"""A text as a model reads it, for strategies that fit a knob to a model."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class TokenReading(NamedTuple):
    """A stretch of a text that somebody else wrote, and what the model thought before each of its tokens."""

    ids: Tensor  # [n]
    logits: Tensor  # [n, V], raw
    # by layer, of the stretch's rows, [kv_heads, group, rows, d]; where the strategy asks for them
    queries: dict[int, Tensor] | None = None
