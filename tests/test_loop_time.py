"""How long the event loop works for an address before its requests wait."""
from __future__ import annotations

import asyncio
from collections import Counter
from math import inf
from time import thread_time

import pytest
from test_request_shares import Client

from playground.request_limits import PUBLIC
from playground.ui.guard.loop_time import LoopTime, LoopTimeLimits, timed
from playground.ui.guard.request_guard import Hosts, RequestGuard
from playground.ui.guard.request_shares import Most, RequestShareLimits, RequestShares

WORK = 0.02  # seconds


def work(seconds: float = WORK) -> None:
    until = thread_time() + seconds
    while thread_time() < until:
        pass


# --- the share of an address ---

class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_address_waits_once_it_has_had_more_than_it_may_have_at_once():
    clock = Clock()
    known = LoopTime(LoopTimeLimits(share=0.1, ahead=0.5), clock)
    known.charge("a", 0.4)
    assert known.wait("a") == 0
    known.charge("a", 0.3)
    assert known.wait("a") == pytest.approx(2.0) and known.wait("b") == 0  # 0.2 s too much, at 0.1 s a second
    clock.now += 2
    assert known.wait("a") == pytest.approx(0)
    clock.now += 1
    known.charge("a", 0.2)
    assert known.wait("a") == pytest.approx(1.0)
    clock.now += 100  # what was not used is not kept
    known.charge("a", 0.6)
    assert known.wait("a") == pytest.approx(1.0)


def test_addresses_that_have_made_up_for_their_work_are_forgotten():
    clock = Clock()
    known = LoopTime(LoopTimeLimits(), clock)
    for number in range(1000):
        known.charge(f"1.1.{number}", 0.001)
        clock.now += 1
    assert len(known._until) < 5


# --- what is charged ---

def charged(function, *given) -> tuple[float, object]:
    """Seconds charged for a coroutine function, and what came of it."""
    charges: list[float] = []

    async def whole() -> object:
        return await timed(function(*given), charges.append)

    try:
        came = asyncio.run(whole())
    except Exception as error:
        came = error
    return sum(charges), came


def test_the_work_of_each_step_is_charged_and_waiting_is_not():
    async def steps() -> str:
        for _ in range(3):
            work()
            await asyncio.sleep(0.05)
        return "done"

    seconds, came = charged(steps)
    assert came == "done" and 3 * WORK <= seconds < 3 * WORK + 0.02


def test_work_before_an_error_is_charged_and_the_error_raised():
    async def fails() -> None:
        await asyncio.sleep(0)
        work()
        raise ValueError("no")

    seconds, came = charged(fails)
    assert isinstance(came, ValueError) and seconds >= WORK


def test_a_time_limit_and_an_error_of_what_is_awaited_reach_the_work():
    async def refused() -> None:
        raise KeyError

    async def waits() -> list[str]:
        met = []
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            met.append("limit")
        try:
            await asyncio.ensure_future(refused())
        except KeyError:
            met.append("error")
        return met

    assert charged(waits)[1] == ["limit", "error"]


# --- requests ---

class Costly:
    """An app that works for each request before it answers; how many of each address it has seen."""

    def __init__(self):
        self.count = Counter()

    async def __call__(self, scope, receive, send):
        self.count[scope["client"][0]] += 1
        work()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def sent(app: Costly, others: int, gone: bool = False) -> dict[str, int]:
    """What was passed on within 0.6 s of 40 requests of one address, beside `others` that wait for their bodies, and of
    one that another address sends in the end. gone: the first address takes its requests back while they wait.
    """
    limits = RequestShareLimits(requests=Most(inf, inf), loop_time=LoopTimeLimits(share=0.02, ahead=3 * WORK))
    guarded = RequestGuard(app, PUBLIC, Hosts(None), 0, RequestShares(limits))
    many, late = [Client("6.6.6.6", "GET") for _ in range(40)], Client("1.1.1.1", "GET")
    clients = [*(Client("2.2.2.2") for _ in range(others)), *many]
    tasks = [asyncio.create_task(client.ask(guarded)) for client in clients]
    await asyncio.sleep(0.4)
    for client in many * gone:
        client.parts.put_nowait({"type": "http.disconnect"})
    tasks.append(asyncio.create_task(late.ask(guarded)))
    await asyncio.sleep(0.2)
    open_tasks = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {**app.count, "open": open_tasks}


def test_an_address_that_has_had_more_than_its_share_waits_and_others_do_not():
    seen = asyncio.run(sent(Costly(), others=1))
    assert 3 <= seen["6.6.6.6"] <= 10 and seen["1.1.1.1"] == 1


def test_an_address_that_is_alone_does_not_wait():
    assert asyncio.run(sent(Costly(), others=0))["6.6.6.6"] == 40


def test_requests_whose_client_has_left_while_they_waited_are_not_passed_on():
    seen = asyncio.run(sent(Costly(), others=1, gone=True))
    assert seen["6.6.6.6"] <= 10 and seen["open"] == 1  # the one that waits for its body
