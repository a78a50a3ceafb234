"""Which connections are accepted, and how many in one turn of the event loop."""
from __future__ import annotations

import http.client
import socket
import threading
from contextlib import ExitStack

import pytest

from playground.ui.guard.connections import BoundedProtocol
from playground.ui.guard.listener import FEW, Listener
from support.small_server import CHUNKED, ask, connect, served

RUBBISH = b"rubbish\r\n\r\n"


@pytest.fixture
def waiting():
    """A listening socket for which 3 FEW connections wait, every other one of 127.0.0.66."""
    with socket.create_server(("127.0.0.1", 0), backlog=4 * FEW) as listening, ExitStack() as held:
        listening.setblocking(False)
        for number in range(3 * FEW):
            held.enter_context(connect(listening.getsockname()[1], f"127.0.0.{66 + number % 2}"))
        yield listening


def turn(listener: Listener) -> list[str]:
    """The addresses accepted in one turn: asyncio accepts until nothing waits."""
    addresses = []
    with ExitStack() as held:
        try:
            while True:
                accepted, address = listener.accept()
                held.enter_context(accepted)
                addresses.append(address[0])
        except BlockingIOError:
            return addresses


def test_a_few_connections_are_accepted_in_one_turn_of_the_event_loop(waiting):
    with Listener(waiting, lambda address: True) as listener:
        listener.setblocking(False)
        assert [len(turn(listener)) for _ in range(5)] == [FEW, FEW, FEW, 0, 0]


def test_connections_of_an_address_that_is_shut_out_are_closed_in_the_turns_of_all(waiting):
    with Listener(waiting, lambda address: address != "127.0.0.66") as listener:
        listener.setblocking(False)
        assert [turn(listener) for _ in range(4)] == [["127.0.0.67"] * (FEW // 2)] * 3 + [[]]


def send_rubbish(port: int, times: int) -> None:
    for _ in range(times):
        with connect(port, "127.0.0.66", RUBBISH) as line:
            assert line.recv(1000).startswith(b"HTTP/1.1 400")


def test_nothing_is_made_of_the_connections_of_an_address_that_sends_rubbish(monkeypatch):
    """It comes back as soon as it is refused: 900 connections a second took a quarter of the event loop's time."""
    made: list[str] = []
    begin = BoundedProtocol.connection_made

    def counting(self, transport) -> None:
        begin(self, transport)
        made.append(self.address)

    monkeypatch.setattr(BoundedProtocol, "connection_made", counting)
    with served(monkeypatch, malformed=5) as (port, _):
        send_rubbish(port, 5)
        for _ in range(50):
            with connect(port, "127.0.0.66") as line, pytest.raises(ConnectionResetError):
                line.sendall(RUBBISH)
                while line.recv(1000):
                    pass
                raise ConnectionResetError  # closed before anything was sent
        assert ask(port, source="127.0.0.2") == b"0"
    assert made.count("127.0.0.66") == 5 and made.count("127.0.0.2") == 1


def test_connections_that_were_accepted_before_their_address_was_shut_out_are_not_read(monkeypatch):
    """A client that sends faster than the event loop reads has hundreds of them."""
    with served(monkeypatch, malformed=5) as (port, known), ExitStack() as held:
        before = [held.enter_context(connect(port, "127.0.0.66")) for _ in range(20)]
        while known.open.count("127.0.0.66") < 20:
            threading.Event().wait(0.01)
        send_rubbish(port, 5)
        read: list[object] = []
        monkeypatch.setattr(BoundedProtocol, "_see", lambda self, event: read.append(event))
        for line in before:
            line.sendall(CHUNKED)
            with pytest.raises(ConnectionResetError):
                assert not line.recv(1000)
                raise ConnectionResetError
        assert not read


def test_a_connection_that_was_read_before_stays_while_its_address_is_shut_out(monkeypatch):
    """Others of its address, which may be a whole school, send the rubbish."""
    with served(monkeypatch, malformed=5) as (port, _):
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=5, source_address=("127.0.0.66", 0))
        for rubbish in (5, 0):
            kept.request("GET", "/")
            assert kept.getresponse().read() == b"0"
            send_rubbish(port, rubbish)
        kept.close()
