"""Plain decoding: one token per forward."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playground.contract import Lane


def plain(lm: Lane) -> Iterator:
    """Commit the token picked from each row until `lm` ends the text."""
    rows = yield lm.prefill()
    while True:
        yield lm.keep(lm.pick(rows))
        rows = yield lm.extend()
