"""What one connection may cost: deadlines, small chunks, numbers of connections, and what is logged."""
from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from playground.ui.guard.connections import (
    FEW,
    AcceptErrors,
    Endings,
    OnceAMinute,
)
from support.small_server import CHUNKED, RUNNING, SLOW_ANSWER, ask, connect, served

ROOT = Path(__file__).parents[1]

def seconds_until_closed(line: socket.socket) -> float:
    begun = time.monotonic()
    try:
        while line.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - begun


def is_open(line: socket.socket) -> bool:
    line.settimeout(0.2)
    try:
        while line.recv(1000):
            pass
        return False
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


# --- deadlines ---

HEADS = {
    "nothing": b"",
    "half a line": b"GET / HT",
    "half a head": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: b",
    "half of a second head": b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HT",
}


@pytest.mark.parametrize("sent", HEADS.values(), ids=HEADS)
def test_a_connection_that_sends_no_whole_head_is_closed(sent, monkeypatch):
    with served(monkeypatch, head_seconds=0.3) as (port, _), connect(port, text=sent) as line:
        assert 0.2 < seconds_until_closed(line) < 2


def test_a_head_that_comes_one_character_at_a_time_has_the_same_time(monkeypatch):
    with served(monkeypatch, head_seconds=0.4) as (port, _), connect(port) as line:
        begun = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(100):
                line.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - begun < 2


def test_a_client_that_reads_nothing_of_its_answer_is_closed(monkeypatch):
    with served(monkeypatch, unread_seconds=0.4) as (port, known):
        with connect(port, text=b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"):
            time.sleep(0.3)
            assert known.open.count() == 1
            time.sleep(1.2)
            assert known.open.count() == 0


def test_the_system_keeps_little_of_an_answer_that_is_not_read(monkeypatch):
    """Linux keeps up to 4 MB for each connection: 400 of them took the event loop seconds, and 1.6 GB of memory."""
    with served(monkeypatch) as (port, _), connect(port, text=b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n") as line:
        time.sleep(0.2)
        line.shutdown(socket.SHUT_WR)  # the server reads the end of the requests, and sends no more than it has
        read = 0
        while part := line.recv(1 << 16):
            read += len(part)
        assert read < 3_000_000


def test_a_client_that_reads_slowly_gets_its_answer(monkeypatch):
    with served(monkeypatch, unread_seconds=1.0, head_seconds=1.0) as (port, _):
        with connect(port, text=b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n") as line:
            read = 0
            while part := line.recv(4_000_000):
                read += len(part)
                time.sleep(0.02)
        assert read > SLOW_ANSWER


def test_a_stream_of_many_minutes_is_not_a_head_that_is_late(monkeypatch):
    with served(monkeypatch, head_seconds=0.2) as (port, _):
        with connect(port, text=b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n") as line:
            time.sleep(0.6)
            assert line.recv(1000).startswith(b"HTTP/1.1 200") and is_open(line)


def test_hundreds_of_streams_that_end_at_once_do_so_a_few_in_each_turn_of_the_event_loop():
    """All of them in one turn let a token of another visitor wait for a second."""
    ended: list[int] = []

    async def turns() -> list[int]:
        endings, loop, after = Endings(), asyncio.get_running_loop(), []
        for number in range(100):
            endings.add(loop, partial(ended.append, number))
        while len(ended) < 100:
            await asyncio.sleep(0)
            after.append(len(ended))
        return after

    after = asyncio.run(turns())
    assert ended == list(range(100)) and after[0] <= FEW and len(after) >= 100 / FEW


def test_the_streams_of_a_client_that_leaves_all_end_in_turns(monkeypatch):
    with served(monkeypatch) as (port, known):
        in_turns, add = [], known.endings.add
        monkeypatch.setattr(known.endings, "add", lambda loop, end: add(loop, in_turns.append(end) or end))
        before, lines = RUNNING["streams"], [stream(port, "127.0.0.66") for _ in range(40)]
        assert all(line.recv(100) for line in lines) and known.open.count() == 40
        for line in lines:
            line.close()
        assert ask(port, source="127.0.0.2") == b"0"
        time.sleep(0.2)
        assert (known.open.count(), RUNNING["streams"]) == (0, before) and len(in_turns) >= 40


# --- small chunks ---

def answer_to(port: int, *parts: bytes) -> bytes:
    read = b""
    with connect(port) as line:
        try:
            for part in parts:
                line.sendall(part)
            while part := line.recv(1000):
                read += part
        except OSError:  # closed while it was being sent
            pass
    return read


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"1;a=b\r\nx\r\n", b"0001\r\nx\r\n", b"2\r\nxx\r\n"], ids=str)
def test_a_body_in_many_small_chunks_is_refused(chunk, monkeypatch, caplog):
    with served(monkeypatch) as (port, _):
        answer = answer_to(port, CHUNKED, chunk * 2000, b"0\r\n\r\n")
        assert answer.partition(b"\r\n")[0] in (b"HTTP/1.1 400 Bad Request", b"")  # empty: closed before it was sent
    assert not [record for record in caplog.records if record.exc_info]


def test_an_app_that_answers_without_reading_leaves_no_traceback_after_a_refusal(monkeypatch, caplog):
    with served(monkeypatch) as (port, _):
        answer_to(port, CHUNKED.replace(b"POST /", b"POST /early") + b"1\r\nx\r\n" * 2000)
        assert ask(port)
    assert not [record for record in caplog.records if record.exc_info]


def test_bodies_in_chunks_of_a_normal_size_are_read(monkeypatch):
    with served(monkeypatch) as (port, _):
        assert answer_to(port, CHUNKED, b"1\r\nx\r\n" * 100, b"0\r\n\r\n").endswith(b"\r\n100\r\n0\r\n\r\n")
        large = b"400\r\n" + b"x" * 1024 + b"\r\n"
        assert b"2048000" in answer_to(port, CHUNKED, *[large] * 2000, b"0\r\n\r\n")


def test_fourteen_megabytes_of_one_byte_chunks_over_eight_connections_do_not_hold_the_event_loop(monkeypatch):
    """h11 takes 6 microseconds for each of 2.4 million: without a bound everybody waits for 13 s."""
    with served(monkeypatch) as (port, _), ThreadPoolExecutor(8) as attackers:
        begun, waits = time.process_time(), []
        sent = [attackers.submit(answer_to, port, CHUNKED, *[b"1\r\nx\r\n" * 10_000] * 30) for _ in range(8)]
        while not waits or not all(one.done() for one in sent):
            asked = time.monotonic()
            assert ask(port, source="127.0.0.2") == b"0"
            waits.append(time.monotonic() - asked)
        assert time.process_time() - begun < 0.5 and max(waits) < 1


def test_an_address_that_sends_one_malformed_request_after_another_is_not_read(monkeypatch):
    """A refused request is followed by the next at once, which kept the event loop as busy as the chunks did."""
    with served(monkeypatch, malformed=5, malformed_seconds=0.6) as (port, _):
        for _ in range(5):
            with connect(port, "127.0.0.66", b"rubbish\r\n\r\n") as line:
                assert line.recv(1000).startswith(b"HTTP/1.1 400")
        with connect(port, "127.0.0.66") as line:
            assert not is_open(line)
        assert ask(port, source="127.0.0.2") == b"0"
        time.sleep(0.8)
        assert ask(port, source="127.0.0.66") == b"0"


def test_rubbish_in_the_middle_of_an_answer_leaves_no_traceback(monkeypatch, caplog):
    with served(monkeypatch) as (port, _):
        head = b"GET /stream HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        with connect(port, text=head) as line:
            assert line.recv(1000)
            line.sendall(b"rubbish\r\n")
            assert seconds_until_closed(line) < 2
        assert ask(port)
    assert not [record for record in caplog.records if record.exc_info]


DROPPED = {
    "in a head": b"GET / HT",
    "in a body": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nhalf",
    "in a chunk": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    "in a stream": b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n",
    "in a large answer": b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("sent", DROPPED.values(), ids=DROPPED)
def test_a_network_that_drops_leaves_no_traceback_and_no_connection(sent, monkeypatch, caplog):
    with served(monkeypatch) as (port, known):
        line = connect(port, text=sent)
        time.sleep(0.1)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
        line.close()
        time.sleep(0.2)
        assert known.open.count() == 0 and ask(port)
    assert not caplog.records


# --- how many ---

def test_an_address_keeps_its_share_and_others_get_in(monkeypatch):
    with served(monkeypatch, whole=16) as (port, known), ExitStack() as held:
        half = [held.enter_context(connect(port, "127.0.0.66", b"GET / HT")) for _ in range(12)]
        assert ask(port, source="127.0.0.2") == b"0"
        assert known.open.count("127.0.0.66") == 4 and sum(map(is_open, half)) == 4


def test_connections_without_a_request_make_room_when_all_are_taken(monkeypatch):
    with served(monkeypatch, whole=16) as (port, known), ExitStack() as held:
        for number in range(40):
            held.enter_context(connect(port, f"127.0.0.{100 + number}", b"GET / HT"))
        assert ask(port, source="127.0.0.2") == b"0" and known.open.count() <= 16


def test_an_idle_connection_of_a_visitor_stays_while_others_fill_all(monkeypatch):
    """Its browser would send the next request on it."""
    with served(monkeypatch, whole=16) as (port, _), ExitStack() as held:
        quiet = http.client.HTTPConnection("127.0.0.1", port, timeout=5, source_address=("127.0.0.2", 0))
        quiet.request("GET", "/")
        assert quiet.getresponse().read() == b"0"
        for number in range(60):
            held.enter_context(connect(port, f"127.0.0.{60 + number % 4}", b"GET / HT"))
        quiet.request("GET", "/")
        assert quiet.getresponse().read() == b"0"
        quiet.close()


def stream(port: int, source: str) -> socket.socket:
    return connect(port, source, b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")


def test_the_address_with_the_most_streams_makes_room_for_one_that_has_none(monkeypatch):
    with served(monkeypatch, whole=16) as (port, known), ExitStack() as held:
        many = [held.enter_context(stream(port, f"127.0.0.{60 + number % 4}")) for number in range(16)]
        time.sleep(0.2)
        quiet = held.enter_context(stream(port, "127.0.0.2"))
        assert quiet.recv(100).startswith(b"HTTP/1.1 200") and is_open(quiet)
        assert sum(map(is_open, many)) == 15 and known.open.count() == 16


@pytest.mark.parametrize("addresses", [4, 5], ids=["full shares", "one address more than shares"])
def test_a_visitor_whose_request_is_on_its_way_does_not_make_room_for_streams(addresses, monkeypatch):
    """The only connection that waits for a head is the visitor's, but the addresses with streams have more."""
    with served(monkeypatch, whole=20) as (port, _), ExitStack() as held:
        for number in range(20):
            held.enter_context(stream(port, f"127.0.0.{60 + number % addresses}"))
        time.sleep(0.1)
        quiet = held.enter_context(connect(port, "127.0.0.2", b"GET / HTTP/1.1\r\n"))
        for number in range(20):
            held.enter_context(stream(port, f"127.0.0.{60 + number % addresses}"))
        time.sleep(0.1)
        quiet.sendall(b"Host: a\r\n\r\n")
        assert quiet.recv(100).startswith(b"HTTP/1.1 200")


def test_a_proxy_on_this_machine_has_no_share_of_its_own(monkeypatch):
    with served(monkeypatch, frozenset({"127.0.0.1"}), whole=16) as (port, known), ExitStack() as held:
        for _ in range(12):
            held.enter_context(connect(port, "127.0.0.1", b"GET / HT"))
        time.sleep(0.2)
        assert known.open.count() == 12 and known.open.count("127.0.0.1") == 0


def test_closed_connections_leave_nothing_behind(monkeypatch):
    with served(monkeypatch, whole=16) as (port, known):
        for number in range(30):
            assert ask(port, source=f"127.0.0.{60 + number}") == b"0"
        time.sleep(0.2)
        assert (known.open.count(), known.waiting.count(), known.open.greediest()) == (0, 0, "")


def test_the_limit_on_open_files_leaves_some_to_the_process():
    code = (
        "from resource import *; setrlimit(RLIMIT_NOFILE, (%d, %d))\n"
        "from playground.ui.guard.connections import most_connections; print(most_connections())"
    )
    for most, connections in ((64, 16), (256, 160), (1024, 800)):
        asked = subprocess.run([sys.executable, "-c", code % (most, most)], cwd=ROOT, capture_output=True, check=True)
        assert int(asked.stdout) == connections


# --- what is logged ---

def test_exhausted_descriptors_are_logged_once(caplog):
    caplog.set_level("WARNING", logger="playground")  # commands, called in another test, silence it
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(AcceptErrors())
    for _ in range(2000):
        loop.call_exception_handler({"message": "accept", "exception": OSError(24, "Too many open files")})
    loop.call_exception_handler({"message": "another", "exception": ValueError("kept")})
    loop.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_a_warning_is_logged_once_a_minute_and_errors_always(caplog):
    logger = logging.getLogger("test of repeats")
    logger.addFilter(OnceAMinute())
    for _ in range(50):
        logger.warning("Invalid HTTP request received.")
        logger.error("an error")
    assert [record.levelname for record in caplog.records].count("WARNING") == 1 and len(caplog.records) == 51


SERVER = """
import asyncio, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
sys.path.insert(0, "tests")
import uvicorn
from support.small_server import app
from playground.ui.guard.connections import Connections
server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started: pass
if sys.argv[1] == "bounded": Connections().serve(server)
print(server.servers[0].sockets[0].getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_half_sent_heads_do_not_use_up_the_descriptors(tmp_path):
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([sys.executable, "-c", SERVER, "bounded"], cwd=ROOT, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        port = int(process.stdout.readline())
        with ExitStack() as held:
            for number in range(300):
                held.enter_context(connect(port, f"127.0.0.{60 + number % 3}", b"GET / HT"))
            assert ask(port, source="127.0.0.2") == b"0"
            time.sleep(1.5)
        assert (tmp_path / "log").stat().st_size < 2_000_000  # unbounded: 5 MB a second
    finally:
        process.kill()
        process.wait(10)
