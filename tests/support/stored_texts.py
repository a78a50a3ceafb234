"""Texts that are stored, and what is near them."""
from __future__ import annotations

from support.contrast_oracles import Row


def squared(a: Row, b: Row) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b))
