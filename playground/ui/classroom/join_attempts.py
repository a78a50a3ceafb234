"""The pace at which codes of a class may be tried. A right code always enters; wrong ones make the next wait.

Codes of an address that has sent several wrong ones wait for a while each. Once there were many wrong codes in all,
every code takes its turn, those of the addresses with the fewest wrong ones first: whoever has just come passes whoever
guesses. With six digits and the pace below, an hour of guessing from any number of addresses finds a code with a
chance below 2 %.
"""
from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from time import monotonic

from playground.errors import Refusal

PERIOD = 60.0  # seconds for which a wrong code counts


@dataclass(frozen=True)
class Pace:
    tries: int = 5  # wrong codes of one address before its codes wait
    wait: float = 12.0  # seconds, for each wrong code beyond
    all_tries: int = 60  # wrong codes of all addresses before every code takes its turn
    turn: float = 0.25  # seconds between two turns
    waiting: int = 8  # codes of one address that wait at a time
    all_waiting: int = 64


class JoinAttempts:
    """Wrong codes of the last PERIOD seconds, and the codes that wait. Used by the event loop only."""

    def __init__(self, pace: Pace | None = None):
        self.pace = pace or Pace()
        self._wrong: deque[tuple[float, str]] = deque()
        self._waiting: list[tuple[int, int, str]] = []  # wrong codes of its address, number, address
        self._numbers, self._next_turn = count(), 0.0

    def add_wrong(self, address: str) -> None:
        self._wrong.append((monotonic(), address))

    async def turn(self, address: str) -> None:
        """Wait until a code of this address may be tried. Raises Refusal if too many of its codes wait already."""
        self._forget_old()
        open_ones = sum(known == address for *_, known in self._waiting)
        place = self._wrong_of(address) + open_ones, next(self._numbers), address
        if open_ones >= self.pace.waiting or not self._has_room(place):
            raise Refusal("There are too many attempts to join: wait a minute and try again.", "code")
        self._waiting.append(place)
        try:
            await asyncio.sleep(self.pace.wait * max(0, place[0] - self.pace.tries + 1))
            while len(self._wrong) >= self.pace.all_tries and not self._take_turn(place):
                await asyncio.sleep(self.pace.turn)
                self._forget_old()
                if place not in self._waiting:
                    raise Refusal("There are too many attempts to join: wait a minute and try again.", "code")
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    def _has_room(self, place: tuple[int, int, str]) -> bool:
        """Whether a code may wait; one of an address with more wrong codes makes room for it."""
        if len(self._waiting) < self.pace.all_waiting:
            return True
        last = max(self._waiting)
        if last[0] > place[0]:
            self._waiting.remove(last)
        return last[0] > place[0]

    def _take_turn(self, place: tuple[int, int, str]) -> bool:
        now = monotonic()
        if now < self._next_turn or place != min(self._waiting):
            return False
        self._next_turn = now + self.pace.turn
        return True

    def _wrong_of(self, address: str) -> int:
        return Counter(known for _, known in self._wrong)[address]

    def _forget_old(self) -> None:
        while self._wrong and monotonic() - self._wrong[0][0] > PERIOD:
            self._wrong.popleft()
