"""Lanes of plain decoding, and a variant of it that is wrong."""
from __future__ import annotations

from playground.contract import Decoder, find
from playground.contract.assembly import Assembly

Greedy = find("greedy")


def lane_of(decoder: Decoder) -> Assembly:
    return Assembly(decoder, decoder.toggles())


# --- greedy ---

class ReadsOneRowTwice(Greedy):
    """Writes two tokens from one row: the second does not depend on the first."""

    def decode(self, lm):
        rows = yield lm.prefill()
        while True:
            yield lm.keep(lm.pick(rows))
            yield lm.keep(lm.pick(rows, purpose="again"))
            rows = yield lm.extend()
