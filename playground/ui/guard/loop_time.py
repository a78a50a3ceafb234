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

TICK = 0.05  # seconds between two looks at what addresses have made up for


@dataclass(frozen=True)
class LoopTimeLimits:
    """ahead: seconds of work that an address, which may be a whole school, may have at once. Those that had more share
    the part `whole` of the event loop's time; each has at least the part `least`.
    """

    ahead: float = 0.5
    whole: float = 0.2
    least: float = 0.1


class LoopTime:
    """Seconds of work that addresses have had lately. Used by the event loop only.

    now: seconds from some moment on.
    """

    def __init__(self, limits: LoopTimeLimits | None = None, now: Callable[[], float] = monotonic):
        self.limits, self._now = limits or LoopTimeLimits(), now
        self._had: dict[str, float] = {}
        self._share, self._settled = self.limits.whole, now()

    def charge(self, address: str, seconds: float) -> None:
        """Count work that was done for an address."""
        self._settle()
        self._had[address] = self._had.get(address, 0.0) + seconds

    def wait(self, address: str) -> float:
        """Seconds until the next request of an address may begin, if no other address asks for more than now."""
        self._settle()
        return max(0.0, self._had.get(address, 0.0) - self.limits.ahead) / self._share

    def _settle(self) -> None:
        """Take off what addresses have made up for."""
        now, before = self._now(), self._settled
        if now - before < TICK:
            return
        limits = self.limits
        waiting = sum(had > limits.ahead for had in self._had.values())
        self._share, self._settled = max(limits.least, limits.whole / max(1, waiting)), now
        made_up = (now - before) * self._share
        self._had = {address: had - made_up for address, had in self._had.items() if had > made_up}

    def charging(self, address: str, most: float) -> Callable[[float], None]:
        """What charges an address for one piece of work, `most` seconds in all."""
        left = most

        def charge(seconds: float) -> None:
            nonlocal left
            if left > 0:
                self.charge(address, min(seconds, left))
                left -= seconds

        return charge


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
