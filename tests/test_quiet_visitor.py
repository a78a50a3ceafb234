"""No request delays another visitor's tokens by more than 2 s, kills the server, or is answered with an internal error.

Each attack (tests/attacks.py) is sent while a quiet visitor runs greedy again and again and notes when tokens arrive.
The attacker has another client address, and a thread and an event loop of its own, so what it does costs the quiet
visitor only what it costs the server.
"""
from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from itertools import pairwise

import pytest
from attacks import ATTACKS, Attack
from visitor import Server, TurnedAway, Visitor, is_sentence, request, start_page

pytestmark = pytest.mark.security
# Seconds beyond the quiet visitor's longest gap without an attack: 2 where this file runs alone; another test worker
# may hold one of two cores for seconds.
MOST_DELAY = 8.0 if "PYTEST_XDIST_WORKER" in os.environ else 2.0
LONGEST_ANSWER = 20.0  # seconds until an attack has an answer
AFTERMATH = 1.0  # seconds watched after the answer, for work that goes on without a client
MOST_MEMORY = 1024  # MB by which an attack may make the server grow
FATAL_MEMORY = 4096  # MB of growth at which the server is killed, so that the machine survives the test


class QuietVisitor(threading.Thread):
    """Runs greedy repeatedly until stopped; `arrivals` are the times at which frames with new tokens arrived."""

    def __init__(self, address: str):
        super().__init__(name="quiet visitor", daemon=True)
        self.address, self.arrivals, self.troubles = address, [], []
        self._done, self.first = threading.Event(), threading.Event()

    def run(self) -> None:
        asyncio.run(self._watch())

    async def _watch(self) -> None:
        async with Visitor(self.address) as visitor:
            while not self._done.is_set():
                try:
                    await self._one_run(visitor)
                except (TurnedAway, OSError, TimeoutError) as trouble:
                    self.troubles.append(repr(trouble))
                    await asyncio.sleep(0.2)
                except Exception as trouble:  # the connection broke in one of httpx's ways
                    self.troubles.append(repr(trouble))
                    return

    async def _one_run(self, visitor: Visitor) -> None:
        async with aclosing(visitor.ask("run", request(prompt="The green bird", length=256))) as answers:
            async for message in answers:
                if message.has_tokens:
                    self.arrivals.append(message.at)
                    self.first.set()
                elif message.kind == "process_completed":
                    self.troubles += message.sentences()
                if self._done.is_set():
                    return

    def stop(self) -> None:
        self._done.set()
        self.join(5)

    def longest_gap(self, since: float, until: float) -> float:
        """Seconds without a new token, at most, between two moments."""
        times = [since, *(at for at in self.arrivals if since < at < until), until]
        return max(later - sooner for sooner, later in pairwise(times))


class Page:
    """The page in public mode; restarted when an attack has ended it or its test has failed."""

    def __init__(self) -> None:
        self.server: Server | None = None
        self.baseline = 0.0

    def up(self) -> Server:
        if self.server is None or not self.server.alive:
            self.server = start_page()
            self.baseline = _gap_alone(self.server.address)
        return self.server

    def down(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server = None


def _gap_alone(address: str) -> float:
    quiet = _watching(address)
    since = time.monotonic()
    time.sleep(2)
    quiet.stop()
    return quiet.longest_gap(since, since + 2)


def _watching(address: str) -> QuietVisitor:
    quiet = QuietVisitor(address)
    quiet.start()
    assert quiet.first.wait(20), f"the quiet visitor got no token before the attack: {quiet.troubles}"
    return quiet


@pytest.fixture(scope="module")
def shared() -> Iterator[Page]:
    page = Page()
    yield page
    page.down()


@pytest.fixture
def page(shared: Page, request: pytest.FixtureRequest) -> Iterator[Page]:
    """What an attack has done to the server must not be counted against the next one."""
    shared.up()
    yield shared
    if getattr(request.node, "harmed", True):
        shared.down()


class Attacker(threading.Thread):
    """Sends one attack from its own address; `said` is the answer, None if there was none in time."""

    def __init__(self, attack: Attack, address: str):
        super().__init__(name="attacker", daemon=True)
        self.attack, self.address, self.said, self.begun = attack, address, None, threading.Event()

    def run(self) -> None:
        asyncio.run(self._send())

    async def _send(self) -> None:
        async with Visitor(self.address, source="127.0.0.66") as visitor:
            await visitor.configure()
            send = self.attack.prepare(visitor)
            self.begun.set()
            try:
                self.said = await asyncio.wait_for(send(visitor), LONGEST_ANSWER)
            except TimeoutError:
                self.said = None


def send_beside(attack: Attack, server: Server) -> tuple[QuietVisitor, Attacker, float, float]:
    """The attack and a quiet visitor at once; the longest gap in the visitor's tokens, and the server's greatest growth
    in MB.
    """
    attacker, quiet, before, most = (
        Attacker(attack, server.address),
        _watching(server.address),
        server.footprint()["mb"],
        0.0,
    )
    attacker.start()
    attacker.begun.wait(30)
    since = time.monotonic()
    while attacker.is_alive() and server.alive and most < FATAL_MEMORY:
        attacker.join(0.1)
        most = max(most, server.footprint()["mb"] - before) if server.alive else most
    time.sleep(AFTERMATH)
    gap = quiet.longest_gap(since, time.monotonic())
    quiet.stop()
    return quiet, attacker, gap, most


def polite(said: str) -> bool:
    """A normal answer, a sentence, or an HTTP refusal that is no server error."""
    refused = re.match(r"HTTP (\d+): ", said)
    return (
        said == "done"
        or is_sentence(said)
        or bool(refused and (400 <= int(refused[1]) < 500 or refused[1] == "503"))
    )


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_an_attack_gets_an_answer_and_delays_no_token_of_another_visitor(
    attack: Attack, page: Page, request: pytest.FixtureRequest
):
    server, log = page.up(), page.server.tracebacks
    quiet, attacker, gap, most = send_beside(attack, server)
    print(
        f"\n{attack.name}: gap {gap:.2f} s (alone {page.baseline:.2f}), grew {most:.0f} MB, alive {server.alive},"
        f" tracebacks {server.tracebacks - log}, said {[line[:160] for line in (attacker.said or ['nothing'])[:3]]},"
        f" quiet {quiet.troubles[:2]}"
    )
    assert server.alive, f"the server ended; its log ends with {''.join(server.log)[-300:]}"
    assert gap - page.baseline <= MOST_DELAY, f"another visitor got no token for {gap:.1f} s"
    assert most <= MOST_MEMORY, f"the server grew by {most:.0f} MB"
    assert not quiet.troubles, f"another visitor was refused: {quiet.troubles[0]}"
    assert attacker.said, f"no answer within {LONGEST_ANSWER} s"
    closed = {"CLOSED ReadError"} if attack.name == "40 MB of numbers" else set()  # refused while it is being sent
    assert all(said in closed or polite(said) for said in attacker.said), (
        f"answered with {[said for said in attacker.said if not polite(said)][0][:300]}"
    )
    assert server.tracebacks == log, "the log has a traceback"
    request.node.harmed = False
