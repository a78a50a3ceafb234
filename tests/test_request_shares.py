"""What the open requests of one address, and of all, may hold."""
from __future__ import annotations

import asyncio
from collections import Counter
from math import inf

import pytest

from playground.request_limits import PUBLIC
from playground.ui.guard.request_guard import Hosts, RequestGuard
from playground.ui.guard.request_shares import Denied, Most, RequestShareLimits, RequestShares, SharedAmount
from support.request_clients import Client


async def answers_at_once(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


async def never_answers(scope, receive, send):
    await asyncio.Event().wait()


def guard(app, proxies: int = 0, **most: Most) -> RequestGuard:
    unlimited = {name: Most(inf, inf) for name in ("requests", "bodies", "body_bytes")}
    shares = RequestShares(RequestShareLimits(**unlimited | most))
    return RequestGuard(app, PUBLIC, Hosts(None), proxies, shares)


async def all_at_once(guarded: RequestGuard, clients: list[Client]) -> list[list[int]]:
    """The answers so far, after each client has sent all that it will."""
    tasks = [asyncio.create_task(client.ask(guarded)) for client in clients]
    await asyncio.sleep(0.02)
    answered = [list(client.answered) for client in clients]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return answered


def unfinished(address: str, size: int = 1000, **more: str) -> Client:
    client = Client(address, **more)
    client.send(b"a" * size)
    return client


def test_unfinished_bodies_of_one_address_are_counted_and_others_get_in():
    guarded = guard(answers_at_once, bodies=Most(3, 10))
    other = Client("2.2.2.2")
    other.send(b"{}", more=False)
    answered = asyncio.run(all_at_once(guarded, [*(unfinished("1.1.1.1") for _ in range(5)), other]))
    assert answered == [[], [], [], [429], [429], [200]]


def test_unfinished_bodies_of_many_addresses_are_counted_in_all():
    guarded = guard(answers_at_once, bodies=Most(3, 4))
    answered = asyncio.run(all_at_once(guarded, [unfinished(f"1.1.1.{number}") for number in range(6)]))
    assert answered == [[]] * 4 + [[503]] * 2


def test_addresses_that_hold_all_do_not_shut_out_a_small_request():
    guarded = guard(answers_at_once, bodies=Most(3, 4, 1), body_bytes=Most(2500, 4000, 100))
    small = Client("2.2.2.2")
    small.send(b'{"data": []}', more=False)
    clients = [*(unfinished(f"1.1.1.{number % 2}") for number in range(4)), small, unfinished("3.3.3.3")]
    assert asyncio.run(all_at_once(guarded, clients)) == [[], [], [], [], [200], [503]]


def test_bytes_of_bodies_are_counted_while_they_arrive():
    guarded = guard(answers_at_once, body_bytes=Most(2500, 4500))
    clients = [unfinished("1.1.1.1") for _ in range(4)] + [unfinished(f"2.2.2.{number}") for number in range(4)]
    assert asyncio.run(all_at_once(guarded, clients)) == [[], [], [429], [429], [], [], [503], [503]]
    assert not guarded.shares.body_bytes.held and not guarded.shares.bodies.held


def test_bytes_of_a_body_count_until_its_request_is_answered():
    guarded = guard(never_answers, body_bytes=Most(2500, inf))
    clients = [Client("1.1.1.1") for _ in range(3)]
    for client in clients:
        client.send(b'"' + b"a" * 998 + b'"', more=False)
    assert asyncio.run(all_at_once(guarded, clients)) == [[], [], [429]]
    assert not guarded.shares.body_bytes.held and not guarded.shares.requests.held


def test_open_streams_of_an_address_are_counted():
    guarded = guard(never_answers, requests=Most(2, inf))
    clients = [Client("1.1.1.1", "GET") for _ in range(4)] + [Client("2.2.2.2", "GET")]
    assert asyncio.run(all_at_once(guarded, clients)) == [[], [], [429], [429], []]
    assert not guarded.shares.requests.held


def test_behind_a_proxy_the_address_is_the_one_it_reports():
    for proxies, expected in ((1, [[], [], [429], []]), (0, [[], [], [429], [429]])):
        guarded = guard(answers_at_once, proxies, bodies=Most(2, 10))
        sent = ["9.9.9.9, 1.1.1.1", "8.8.8.8, 1.1.1.1", "7.7.7.7, 1.1.1.1", "1.1.1.1, 2.2.2.2"]
        clients = [unfinished("10.0.0.1", forwarded=forwarded) for forwarded in sent]
        assert asyncio.run(all_at_once(guarded, clients)) == expected


def test_a_share_that_is_full_is_refused_with_a_sentence():
    share = SharedAmount(Most(1, 2), "open requests")
    share.take("a", 1)
    with pytest.raises(Denied, match="^Your address has too many open requests on this page: wait for some to end.$"):
        share.take("a", 1)
    share.take("b", 1)
    with pytest.raises(Denied, match="^The page has too many open requests: try again in a moment.$"):
        share.take("c", 1)


# --- how many are begun at a time ---

class Begun:
    """An app whose answers begin when `answer` is set and never end; how many requests of each address were begun."""

    def __init__(self):
        self.answer, self.count = asyncio.Event(), Counter()

    async def __call__(self, scope, receive, send):
        self.count[scope["client"][0]] += 1
        await self.answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()


async def begun(app: Begun, seconds: float) -> dict[str, int]:
    """Requests that were begun within `seconds`, where one address sends many and then another sends one."""
    shares = RequestShares(RequestShareLimits(requests=Most(inf, inf), begun=3, begun_seconds=0.2))
    guarded = RequestGuard(app, PUBLIC, Hosts(None), 0, shares)
    clients = [Client("6.6.6.6", "GET") for _ in range(20)] + [Client("1.1.1.1", "GET")]
    tasks = [asyncio.create_task(client.ask(guarded)) for client in clients]
    await asyncio.sleep(seconds)
    counted = dict(app.count)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return counted


def test_one_address_begins_a_few_requests_at_a_time_and_others_do_not_wait():
    assert asyncio.run(begun(Begun(), 0.1)) == {"6.6.6.6": 3, "1.1.1.1": 1}


def test_streams_that_have_begun_hold_nobody_up():
    async def open_streams() -> dict[str, int]:
        app = Begun()
        app.answer.set()
        return await begun(app, 0.1)

    assert asyncio.run(open_streams()) == {"6.6.6.6": 20, "1.1.1.1": 1}


def test_a_request_that_takes_long_to_answer_does_not_keep_the_others_of_its_address():
    assert asyncio.run(begun(Begun(), 0.3))["6.6.6.6"] == 6
