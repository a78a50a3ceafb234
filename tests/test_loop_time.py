"""How long the event loop works for an address before its requests wait."""
from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from math import inf
from time import monotonic, thread_time
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from playground.request_limits import PUBLIC
from playground.ui.guard.loop_time import BUSY, LONG, SHORT, WINDOW, Handover, LoopTime, LoopTimeLimits, timed
from playground.ui.guard.request_guard import Hosts, RequestGuard
from playground.ui.guard.request_shares import Most, RequestShareLimits, RequestShares
from playground.ui.guard.sessions import EVENT, charge_events
from support.request_clients import Client

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
    known = LoopTime(LoopTimeLimits(ahead=0.5, whole=0.1), clock)
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


def test_addresses_that_want_more_share_a_part_of_the_time_and_one_that_does_not_keeps_its_own():
    """Four attackers get together what one would."""
    clock = Clock()
    known = LoopTime(LoopTimeLimits(ahead=0.5, whole=0.2, least=0.02), clock)
    attackers = [f"127.0.0.{number}" for number in range(4)]
    had = dict.fromkeys([*attackers, "quiet"], 0.0)
    for _ in range(1000):  # 100 s
        for address in attackers:
            while known.wait(address) == 0:
                known.charge(address, 0.01)
                had[address] += 0.01
        assert known.wait("quiet") == 0
        known.charge("quiet", 0.001)
        clock.now += 0.1
    assert all(had[address] == pytest.approx(0.5 + 100 * 0.05, rel=0.1) for address in attackers)


def test_each_of_many_addresses_has_at_least_a_small_part():
    clock = Clock()
    known = LoopTime(LoopTimeLimits(ahead=0.5, whole=0.2, least=0.02), clock)
    for number in range(50):
        known.charge(f"1.1.1.{number}", 0.7)
    clock.now += 5
    assert known.wait("1.1.1.1") == pytest.approx(5.0)


def test_addresses_that_have_made_up_for_their_work_are_forgotten():
    clock = Clock()
    known = LoopTime(LoopTimeLimits(), clock)
    for number in range(1000):
        known.charge(f"1.1.{number}", 0.001)
        clock.now += 1
    assert len(known._had) < 5


# --- turns of the interpreter ---

@pytest.fixture
def turns() -> Iterator[Callable[[float, float], float]]:
    """Seconds of a turn after `count` seconds in which requests take this share of the event loop."""
    before = sys.getswitchinterval()

    async def after(share: float, count: float) -> float:
        known, end = LoopTime(noted=Handover().note), monotonic() + count
        while monotonic() < end:
            known.charge("a", 0.02 * share)
            await asyncio.sleep(0.02)
        return sys.getswitchinterval()

    yield lambda share, count: asyncio.run(after(share, count))
    sys.setswitchinterval(before)


def test_threads_take_turns_of_half_a_millisecond_while_requests_keep_the_event_loop_busy(turns):
    assert turns(4 * BUSY, 2.5 * WINDOW) == pytest.approx(SHORT)
    assert turns(BUSY / 4, 2.5 * WINDOW) == pytest.approx(LONG)


def test_a_run_that_goes_on_after_a_burst_of_requests_gets_long_turns_again(turns):
    async def burst() -> None:
        LoopTime(noted=Handover().note).charge("a", 2 * BUSY * WINDOW)
        for expected in (SHORT, LONG):
            while sys.getswitchinterval() != pytest.approx(expected):
                await asyncio.sleep(WINDOW / 50)

    asyncio.run(asyncio.wait_for(burst(), 20 * WINDOW))


def test_work_that_nobody_is_charged_for_shortens_the_turns_as_well():
    """Such as that of connections that are accepted, and refused before a request."""
    async def accepting() -> None:
        while sys.getswitchinterval() != pytest.approx(SHORT):
            known.charge("a", 1e-6)
            work()
            await asyncio.sleep(0)

    before, known = sys.getswitchinterval(), LoopTime(noted=Handover().note)
    try:
        asyncio.run(asyncio.wait_for(accepting(), 20 * WINDOW))
    finally:
        sys.setswitchinterval(before)


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


# --- events ---

class Queue:
    """Gradio's queue, which works 30 times for an event: for each frame of a run."""

    async def process_events(self, events, batch):
        for _ in range(30):
            work(EVENT / 3)
            await asyncio.sleep(0)


def test_an_event_is_charged_to_its_address_and_the_frames_of_a_run_are_not():
    clock, queue = Clock(), Queue()
    known = LoopTime(LoopTimeLimits(ahead=0, whole=0.1), clock)
    charge_events(queue, known, proxies=1)
    asked = Request({"type": "http", "headers": [(b"x-forwarded-for", b"6.6.6.6")], "client": ("10.0.0.1", 1)})
    asyncio.run(queue.process_events([SimpleNamespace(request=asked)], False))
    assert known.wait("6.6.6.6") == pytest.approx(EVENT / 0.1) and known.wait("10.0.0.1") == 0


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
    shares = RequestShares(RequestShareLimits(requests=Most(inf, inf)),
                           LoopTime(LoopTimeLimits(ahead=3 * WORK, whole=0.02, least=0.02)))
    guarded = RequestGuard(app, PUBLIC, Hosts(None), 0, shares)
    many, late = [Client("6.6.6.6", "GET") for _ in range(40)], Client("1.1.1.1", "GET")
    clients = [*(Client("2.2.2.2") for _ in range(others)), *many]
    tasks = [asyncio.create_task(client.ask(guarded)) for client in clients]
    await asyncio.sleep(0.4)
    for client in many * gone:
        client.parts.put_nowait({"type": "http.disconnect"})
    tasks.append(asyncio.create_task(late.ask(guarded)))
    await asyncio.wait(tasks[others:-1], timeout=5 if gone else 0.2)
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
