"""Studies: conclusions from finished runs."""
from __future__ import annotations

from typing import TYPE_CHECKING

from playground.contract.base import Strategy

if TYPE_CHECKING:
    from playground.events import Figure, Note
    from playground.trace import Trace


class Study(Strategy):
    """A function of traces with a figure."""

    kind = "study"

    def draw(self, traces: list[Trace]) -> list[Figure | Note]:
        """Figures and notes about finished lanes, one trace per lane. Raises Refusal."""
        raise NotImplementedError
