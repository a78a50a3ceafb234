"""Protocol between a confined child and its clients: orders of one byte, and JSON messages with their length before
them.
"""
from __future__ import annotations

import json
import socket
import struct
from typing import Any

TEACH, ASK = b"t", b"a"
UNKNOWN = {"unknown": "lesson"}  # the answer of a fork that lacks what its task needs
LENGTH = struct.Struct("!I")


def packed(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def receive(line: socket.socket, most: int) -> Any:
    """One message; raises EOFError if the other side has closed or sent more than `most` bytes."""
    (length,) = LENGTH.unpack(_exactly(line, LENGTH.size))
    if length > most:
        raise EOFError
    return json.loads(_exactly(line, length))


def _exactly(line: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if not (part := line.recv(min(count - len(parts), 1 << 20))):
            raise EOFError
        parts += part
    return bytes(parts)
