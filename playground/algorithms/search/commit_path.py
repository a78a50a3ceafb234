"""Commits a text that a search found instead of generating it token by token."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from playground.contract import Lane
    from playground.decoding.rows import Rows


class FoundToken(NamedTuple):
    """One token of the text, and the row of logits after `node` that predicted it."""

    token: int
    rows: Rows
    node: int


def adopt(lm: Lane, found: list[FoundToken]) -> Iterator:
    """Commit these tokens to a fork and make it the lane's text. Their KV cache is reused, so no forward is needed."""
    [leaf] = lm.fork(1)
    yield lm.keep([lm.choose(rows, token, node, leaf) for token, rows, node in found])
    yield lm.keep(leaf)
