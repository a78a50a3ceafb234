"""How long the event loop has lately worked for each address, so that one which has had more than its share waits.

All requests are read and begun in one thread, which takes turns with the one that runs the models. A client that sends
one costly request after another would get most of the former, and so half of the latter.
"""
from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Any


@dataclass(frozen=True)
class LoopTimeLimits:
    """share: of the event loop's time, for each address, which may be a whole school; ahead: seconds of work that an
    address may have at once.
    """

    share: float = 0.05
    ahead: float = 0.5


class LoopTime:
    """Seconds of work that addresses have had beyond their share so far. Used by the event loop only.

    now: seconds from some moment on.
    """

    def __init__(self, limits: LoopTimeLimits | None = None, now: Callable[[], float] = monotonic):
        self.limits, self._now = limits or LoopTimeLimits(), now
        self._until: dict[str, float] = {}  # when the share of an address will have made up for its work

    def charge(self, address: str, seconds: float) -> None:
        """Count work that was done for an address."""
        now = self._now()
        if address not in self._until:
            self._until = {known: until for known, until in self._until.items() if until > now}
        self._until[address] = max(now, self._until.get(address, now)) + seconds / self.limits.share

    def wait(self, address: str) -> float:
        """Seconds until the next request of an address may begin."""
        return max(0.0, self._until.get(address, 0.0) - self.limits.ahead / self.limits.share - self._now())


@types.coroutine
def timed(work: Coroutine[Any, Any, Any], charge: Callable[[float], None]) -> Generator[Any, Any, Any]:
    """Await `work`, and charge each of its steps: the seconds of the processor that the thread was busy with it."""
    step, given = work.send, None
    while True:
        begun = thread_time()
        try:
            waits_for = step(given)
        except StopIteration as end:
            return end.value
        finally:
            charge(thread_time() - begun)
        try:
            step, given = work.send, (yield waits_for)
        except BaseException as reason:
            step, given = work.throw, reason
