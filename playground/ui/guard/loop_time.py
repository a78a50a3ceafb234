"""How long the event loop has lately worked for requests: for each address, and in all.

All requests are read and begun in one thread, which takes turns with the one that runs the models. A client that sends
one costly request after another would get most of the former, and so half of the latter: an address that has had more
than its share waits. And while there is much work, the two threads take shorter turns.
"""
from __future__ import annotations

import sys
import types
from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Any

TICK = 0.05  # seconds between two looks at what addresses have made up for
LONG, SHORT = 0.005, 0.0005  # seconds that a thread may keep the interpreter while another waits for it
WINDOW = 0.25  # seconds between two looks at all work
BUSY = 0.05  # share of the event loop's time for requests
FULL = 0.2  # and for all it does: it accepts connections and reads heads before anybody is charged for a request


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

    now: seconds from some moment on. noted: called with the seconds of each piece of work.
    """

    def __init__(self, limits: LoopTimeLimits | None = None, now: Callable[[], float] = monotonic,
                 noted: Callable[[float], None] = lambda seconds: None):
        self.limits, self._now, self._noted = limits or LoopTimeLimits(), now, noted
        self._had: dict[str, float] = {}
        self._share, self._settled = self.limits.whole, now()

    def charge(self, address: str, seconds: float) -> None:
        """Count work that was done for an address."""
        self._noted(seconds)
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


class Handover:
    """Shortens the turns of the interpreter while there is work for requests. Used by the event loop only.

    The worker gives up the interpreter in every kernel of a forward, hundreds of times a token, and waits for it each
    time up to LONG, Python's own, while the event loop is busy. With SHORT a lone run loses a seventh of its tokens per
    second, so what the event loop does for runs alone, which is less than FULL, does not shorten them.
    """

    def __init__(self) -> None:
        self._worked, self._before = 0.0, 0.0
        self._next_look: TimerHandle | None = None

    def note(self, seconds: float) -> None:
        """Count work for a request."""
        self._worked += seconds
        if self._next_look is None:
            self._look_later()

    def _look(self) -> None:
        busy = self._worked > BUSY * WINDOW or thread_time() - self._before > FULL * WINDOW
        sys.setswitchinterval(SHORT if busy else LONG)
        self._worked, self._next_look = 0.0, None
        if busy:
            self._look_later()

    def _look_later(self) -> None:
        self._before = thread_time()
        self._next_look = get_running_loop().call_later(WINDOW, self._look)


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
