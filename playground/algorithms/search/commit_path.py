"""A text that was found by looking ahead rather than written token by token becomes the lane's text."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from playground.decoding.lane import Lane
    from playground.decoding.rows import Rows


class FoundToken(NamedTuple):
    """One token of the text, and the row it was read from: the one after `node`."""

    token: int
    rows: Rows
    node: int


def adopt(lm: Lane, found: list[FoundToken]) -> Iterator:
    """Write these tokens on a sequence of their own and keep it. What their tree has in the cache stays there: nothing
    is read again.
    """
    [leaf] = lm.fork(1)
    yield lm.keep([lm.choose(rows, token, node, leaf) for token, rows, node in found])
    yield lm.keep(leaf)
