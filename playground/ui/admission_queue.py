"""A line of visitors for something that only so many of them have at a time: first come, first served, but for those
who let others go before.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = 1.0  # seconds after which somebody who waits hears where they stand


class AdmissionQueue:
    """Whoever waits is any object of their own, which stays in the line until it leaves; the first `seats` of it are
    served.

    Somebody of whom `rests` is true needs no seat as long as it is.
    """

    def __init__(self, seats: int = 1, rests: Callable[[Any], bool] = lambda who: False):
        self.seats, self.rests = seats, rests
        self._waiting: list[object] = []
        self._bell = threading.Condition()

    def wait(self, who: object) -> Iterator[int]:
        """Join the end and hear, again and again, how many must make room before; over when it is one's turn."""
        with self._bell:
            self._waiting.append(who)
        while before := self._before(who):
            yield before
            with self._bell:
                self._bell.wait_for(lambda: self._before(who) < before, PATIENCE)

    def leave(self, who: object) -> None:
        """Make room for the next; for somebody who is not there nothing happens."""
        with self._bell:
            self._waiting = [other for other in self._waiting if other is not who]
            self._bell.notify_all()

    def _before(self, who: object) -> int:
        ahead = self._waiting[:self._waiting.index(who)]
        return max(0, sum(not self.rests(other) for other in ahead) - self.seats + 1)
