"""A small server with the connections of the page, and clients that speak to it over sockets."""
from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager

import uvicorn

from playground.ui.guard import connections as connections_module
from playground.ui.guard.connections import ConnectionLimits, Connections

SLOW_ANSWER = 300_000_000
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
RUNNING = Counter()  # streams of the app below


async def app(scope, receive, send):
    """Answers with the size of the body, /early without reading it; /large with more than buffers hold, /stream with an
    answer that does not end.
    """
    size, more = 0, True
    while more and scope["method"] == "POST" and scope["path"] != "/early":
        message = await receive()
        if message["type"] != "http.request":
            break
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/large":
        for _ in range(SLOW_ANSWER // 1_000_000):
            await send({"type": "http.response.body", "body": bytes(1_000_000), "more_body": True})
    if scope["path"] == "/stream":
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        RUNNING["streams"] += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        RUNNING["streams"] -= 1
        return
    await send({"type": "http.response.body", "body": str(size).encode()})


@contextmanager
def served(monkeypatch, trusted: frozenset[str] | None = frozenset(), **limits):
    """The port and the connections of a server."""
    monkeypatch.setattr(connections_module, "SWEEP", 0.05)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    known = Connections(ConnectionLimits(**limits), trusted)
    known.serve(server)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], known
    finally:
        server.should_exit = server.force_exit = True
        thread.join(5)


def connect(port: int, source: str = "127.0.0.1", text: bytes = b"") -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(source, 0))
    line.sendall(text)
    return line


def ask(port: int, path: str = "/", source: str = "127.0.0.1") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5, source_address=(source, 0))
    connection.request("GET", path)
    answer = connection.getresponse().read()
    connection.close()
    return answer
