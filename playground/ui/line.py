"""A line of visitors for something that one of them has at a time: first come, first served."""
from __future__ import annotations

import threading
from collections.abc import Iterator

PATIENCE = 1.0  # seconds after which somebody who waits hears where they stand


class Line:
    """Whoever waits is any object of their own, which stays in the line until it leaves."""

    def __init__(self):
        self._waiting: list[object] = []
        self._bell = threading.Condition()

    def wait(self, who: object) -> Iterator[int]:
        """Join the end and hear, again and again, how many are before; over when it is one's turn."""
        with self._bell:
            self._waiting.append(who)
        while before := self._waiting.index(who):
            yield before
            with self._bell:
                self._bell.wait_for(lambda: self._waiting.index(who) < before, PATIENCE)

    def leave(self, who: object) -> None:
        """Make room for the next; for somebody who is not there nothing happens."""
        with self._bell:
            self._waiting = [other for other in self._waiting if other is not who]
            self._bell.notify_all()
