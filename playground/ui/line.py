"""A line of visitors for something that only so many of them have at a time: first come, first served."""
from __future__ import annotations

import threading
from collections.abc import Iterator

PATIENCE = 1.0  # seconds after which somebody who waits hears where they stand


class Line:
    """Whoever waits is any object of their own, which stays in the line until it leaves; the first `seats` of it are served."""

    def __init__(self, seats: int = 1):
        self.seats = seats
        self._waiting: list[object] = []
        self._bell = threading.Condition()

    def wait(self, who: object) -> Iterator[int]:
        """Join the end and hear, again and again, how many must leave before; over when it is one's turn."""
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
        return max(0, self._waiting.index(who) - self.seats + 1)
