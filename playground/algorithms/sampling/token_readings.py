"""Logits of a model on given texts, for strategies that fit knobs to a model."""
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class TokenReading(NamedTuple):
    """A chunk of a text and the logits before each of its tokens."""

    ids: Tensor  # [n]
    logits: Tensor  # [n, V], raw
    # query states by layer, [kv_heads, group, rows, d]; if the strategy `ReadsQueries`
    queries: dict[int, Tensor] | None = None
