"""How far a download is: the hub's client counts bytes with a progress bar, and this one reports them."""
from __future__ import annotations

from collections.abc import Callable

from tqdm.std import tqdm


def counting(report: Callable[[int], None]) -> type[tqdm]:
    """A class of progress bars that draw nothing; `report` is called with the bytes of the file that have arrived.

    What `report` raises ends the download.
    """

    class Counting(tqdm):
        def __init__(self, *given: object, **settings: object):
            super().__init__(*given, **{**settings, "disable": True})
            self.arrived = int(settings.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self.arrived += int(n or 0)
            report(self.arrived)

    return Counting
