"""What the open requests of an address, and of all, may hold: their number, unfinished bodies, and bytes of bodies; and
how many of an address are begun at a time.
"""
from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from weakref import WeakValueDictionary

from playground.ui.guard.connections import ConnectionLimits
from playground.ui.guard.loop_time import LoopTime

AGAIN = 1.0  # seconds after which a request that waits looks again whether it has to

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""The address of the client whose HTTP request is being answered; empty outside of requests."""


class Denied(Exception):
    """A request that is not passed on, with its HTTP status."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Most:
    """The most that one address and all together may hold. One address may be a whole school.

    small: what an address may hold even where all together hold too much, so that several do not shut out the others.
    """

    address: float
    whole: float
    small: float = 0


@dataclass(frozen=True)
class RequestShareLimits:
    requests: Most = field(default_factory=lambda: Most(ConnectionLimits().address, inf))  # of all: its connections
    bodies: Most = Most(64, 192, 4)  # that have not arrived completely
    body_bytes: Most = Most(32_000_000, 128_000_000, 100_000)  # until the request is answered
    begun: int = 8  # requests of one address, until their answers begin; the next ones of the address wait
    begun_seconds: float = 1.0  # after which a request whose answer takes longer does not count any more


class SharedAmount:
    """Amounts that addresses hold of something."""

    def __init__(self, most: Most, what: str):
        self.most, self.what = most, what
        self.held: Counter[str] = Counter()

    def take(self, address: str, amount: int) -> None:
        """Raise Denied if the address, or all, would hold too much."""
        if self.held[address] + amount > self.most.address:
            raise Denied(429, f"Your address has too many {self.what} on this page: wait for some to end.")
        if self.held.total() + amount > self.most.whole and self.held[address] + amount > self.most.small:
            raise Denied(503, f"The page has too many {self.what}: try again in a moment.")
        self.held[address] += amount

    def give_back(self, address: str, amount: int) -> None:
        self.held[address] -= amount
        if not self.held[address]:
            del self.held[address]

    @contextmanager
    def one(self, address: str) -> Iterator[None]:
        """Hold one for as long as this context; raises Denied."""
        self.take(address, 1)
        try:
            yield
        finally:
            self.give_back(address, 1)


class RequestShares:
    """The shares of all requests of a page."""

    def __init__(self, limits: RequestShareLimits | None = None, loop_time: LoopTime | None = None):
        limits = limits or RequestShareLimits()
        self.requests = SharedAmount(limits.requests, "open requests")
        self.bodies = SharedAmount(limits.bodies, "unfinished requests")
        self.body_bytes = SharedAmount(limits.body_bytes, "bytes in open requests")
        self.loop_time = loop_time or LoopTime()
        self.turns = Turns(limits, self._wait)

    def _wait(self, address: str) -> float:
        """Seconds until a request of an address may begin: none while it is alone on the page."""
        return self.loop_time.wait(address) if len(self.requests.held) > 1 else 0.0


class Left(Exception):
    """The client left while its request waited for a turn."""


class Turns:
    """Requests of an address are begun a few at a time. The event loop serves all that are ready in turn: among
    hundreds that one address begins at once, a token of another visitor would wait for a step of each, and often.

    wait: seconds until a request of an address may begin, for the work that was done for those before it.
    """

    def __init__(self, limits: RequestShareLimits, wait: Callable[[str], float]):
        self.limits, self._wait = limits, wait
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # kept by those who wait or go on

    async def take(self, address: str, left_within: Callable[[float], Awaitable[bool]]) -> Turn:
        """Wait for a turn, in order of arrival.

        left_within: whether the client leaves within so many seconds, which it takes otherwise. Raises Left.
        """
        if (places := self._of.get(address)) is None:
            places = self._of[address] = asyncio.Semaphore(self.limits.begun)
        await places.acquire()
        turn = Turn(places)
        try:
            while seconds := self._wait(address):
                if await left_within(min(seconds, AGAIN)):
                    raise Left
        except BaseException:
            turn.end()
            raise
        turn.end_after(self.limits.begun_seconds)
        return turn


class Turn:
    """The turn of one request, which ends when its answer begins, or after some seconds."""

    def __init__(self, places: asyncio.Semaphore):
        self._places: asyncio.Semaphore | None = places
        self._late: asyncio.TimerHandle | None = None

    def end_after(self, seconds: float) -> None:
        self._late = asyncio.get_running_loop().call_later(seconds, self.end)

    def end(self) -> None:
        """End the turn; calling it again does nothing."""
        if self._places is not None:
            self._places.release()
            self._places = None
        if self._late is not None:
            self._late.cancel()


class HeldBody:
    """The body of one request, counted while it arrives and until it is released."""

    def __init__(self, shares: RequestShares, address: str):
        self.shares, self.address, self.size = shares, address, 0

    def add(self, size: int) -> None:
        """Count bytes that have arrived; raises Denied."""
        self.shares.body_bytes.take(self.address, size)
        self.size += size

    def release(self) -> None:
        self.shares.body_bytes.give_back(self.address, self.size)
        self.size = 0
