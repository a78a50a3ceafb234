"""What one connection to the page may cost: uvicorn's HTTP protocol with deadlines, and counts of open connections.

uvicorn waits without end for the head of a request and for a client that does not read its answer, and it parses a body
in Python, chunk by chunk. Here a connection that sends no whole head is closed, so is one whose client takes nothing of
its answer, and a body in many small chunks is refused. An address, and all of them together, have a number of
connections; when it is reached, one of the address with the most that waits for a request makes room.
"""
from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from socket import SO_SNDBUF, SOL_SOCKET
from time import monotonic
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from playground.ui.guard.listener import listen

SWEEP = 1.0  # seconds between two looks at the deadlines
QUIET = 60.0  # seconds in which the same warning is logged once
DESCRIPTORS = 96  # of the process that connections leave to files, pipes and children
WHOLE = 800  # connections, where the process may have that many descriptors
FEWEST = 16
STARTING = 10.0  # seconds in which a server that runs begins to accept connections anew
FEW = 4  # lost connections whose requests end in one turn of the event loop
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
log = logging.getLogger(__name__)


def most_connections() -> int:
    """How many connections the limit on open files (`ulimit -n`) allows, at most WHOLE."""
    try:
        from resource import RLIMIT_NOFILE, getrlimit
    except ImportError:  # Windows, which has no such limit
        return WHOLE
    return min(WHOLE, max(FEWEST, getrlimit(RLIMIT_NOFILE)[0] - DESCRIPTORS))


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection, and numbers of connections: in all, and of one address, which may be a whole school."""

    whole: int = field(default_factory=most_connections)
    head_seconds: float = 10.0  # until the head of a request has arrived, from the connection or the last answer on
    unread_seconds: float = 30.0  # in which a client takes nothing of its answer
    unread_bytes: int = 1 << 17  # of an answer that the system keeps for it; Linux allows 4 MB, and doubles this
    chunks: int = 128  # parts of a body, however small
    chunk_bytes: int = 256  # of the parts beyond, on average
    malformed: int = 20  # requests of one address, after which its new connections are closed unread
    malformed_seconds: float = 10.0  # for which they count

    @property
    def address(self) -> int:
        return max(1, self.whole // 4)


class Connections:
    """All open connections of a server. Used by its event loop only.

    trusted: addresses of proxies, which have no share of their own; None: all connections come from proxies, and their
    clients' addresses are counted by playground.ui.guard.request_shares alone.
    """

    def __init__(self, limits: ConnectionLimits | None = None, trusted: frozenset[str] | None = frozenset()):
        self.limits, self.trusted = limits or ConnectionLimits(), trusted
        # in the order in which they came, and those that wait for a head in the order in which they began to
        self.open, self.waiting, self.endings = ByAddress(), ByAddress(), Endings()
        self._malformed: dict[str, tuple[int, float]] = {}  # how many requests of an address, and since when
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve(self, server: Any) -> None:
        """Make a running uvicorn server accept further connections with these limits; not called in its event loop."""
        server.config.http_protocol_class = partial(BoundedProtocol, self)
        own_loop = server.servers[0].get_loop()
        if isinstance(own_loop, asyncio.SelectorEventLoop):  # others, of Windows and uvloop, do not accept in Python
            asyncio.run_coroutine_threadsafe(listen(server, self.reads), own_loop).result(STARTING)

    def reads(self, address: str) -> bool:
        """Whether requests of an address are read: not for a while after it has sent many malformed ones."""
        return self._malformed.get(address, (0, 0.0))[0] < self.limits.malformed

    def admit(self, connection: BoundedProtocol) -> bool:
        """Count a new connection, for which another may have to make room. False if it has to be closed."""
        self._watch(connection.loop)
        address, most = self._address(connection), self.limits
        if address and self.open.count(address) >= most.address and not self._end(self.waiting.first(address)):
            return False
        if self.open.count() >= most.whole and not self._end(self._which_makes_room(address)):
            return False
        self.open.add(address, connection)
        self.wait(connection)
        return True

    def release(self, connection: BoundedProtocol) -> None:
        self.open.remove(self._address(connection), connection)
        self.go_on(connection)

    def wait(self, connection: BoundedProtocol) -> None:
        """An open connection waits for the head of a request from now on."""
        if connection in self.open:
            connection.waiting_since = monotonic()
            self.waiting.add(self._address(connection), connection)

    def go_on(self, connection: BoundedProtocol) -> None:
        """A connection does not wait for a head any longer."""
        connection.waiting_since = None
        self.waiting.remove(self._address(connection), connection)

    def note_malformed(self, connection: BoundedProtocol) -> None:
        """Each costs a connection and the reading of some parts, and the next comes as soon as it is refused."""
        if address := self._address(connection):
            times, since = self._malformed.get(address, (0, monotonic()))
            self._malformed[address] = times + 1, since

    def sweep(self) -> None:
        """Close the connections whose time is over."""
        now, kept = monotonic(), self.limits.malformed_seconds
        self._malformed = {one: known for one, known in self._malformed.items() if now - known[1] < kept}
        for connection in self.open:
            connection.check(now, self.limits)

    def _address(self, connection: BoundedProtocol) -> str:
        """The address that a connection counts towards; empty for those of proxies."""
        return "" if self.trusted is None or connection.address in self.trusted else connection.address

    def _which_makes_room(self, address: str) -> BoundedProtocol | None:
        """The connection that ends for a new one of `address` where all are taken. Of the address with the most, if it
        then still has more than `address`: the one that has waited longest for a head, otherwise its last. Where none
        has, one that waits of `address` itself, or of another that has as many as `address` would have.
        """
        greediest, mine = self.open.greediest(), self.open.count(address)
        if self.open.count(greediest) > mine + 1:
            return self.waiting.first(greediest) or self.open.last(greediest)
        as_many = (one for one in self.waiting if self.open.count(self._address(one)) > mine)
        return self.waiting.first(address) or next(as_many, None)

    def _end(self, connection: BoundedProtocol | None) -> bool:
        if connection is None:
            return False
        self.release(connection)
        connection.transport.abort()
        return True

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to look at the deadlines, with the first connection."""
        if self._loop is loop:
            return
        self._loop = loop
        loop.set_exception_handler(AcceptErrors())
        logging.getLogger("uvicorn.error").addFilter(OnceAMinute())
        loop.call_later(SWEEP, self._sweep_on)

    def _sweep_on(self) -> None:
        self.sweep()
        self._loop.call_later(SWEEP, self._sweep_on)


class ByAddress:
    """Connections in the order in which they were added, of each address and of all."""

    def __init__(self):
        self._all: dict[BoundedProtocol, None] = {}
        self._of: dict[str, dict[BoundedProtocol, None]] = {}

    def __contains__(self, connection: BoundedProtocol) -> bool:
        return connection in self._all

    def __iter__(self) -> Iterator[BoundedProtocol]:
        return iter(list(self._all))

    def add(self, address: str, connection: BoundedProtocol) -> None:
        """Add a connection, or move it to the end."""
        self.remove(address, connection)
        self._all[connection] = None
        self._of.setdefault(address, {})[connection] = None

    def remove(self, address: str, connection: BoundedProtocol) -> None:
        self._all.pop(connection, None)
        mine = self._of.get(address, {})
        mine.pop(connection, None)
        if not mine:
            self._of.pop(address, None)

    def count(self, address: str | None = None) -> int:
        return len(self._all if address is None else self._of.get(address, {}))

    def first(self, address: str | None = None) -> BoundedProtocol | None:
        return next(iter(self._all if address is None else self._of.get(address, {})), None)

    def last(self, address: str) -> BoundedProtocol | None:
        return next(reversed(self._of.get(address, {})), None)

    def greediest(self) -> str:
        """The address with the most connections; empty if there are none, or all come from proxies."""
        return max((address for address in self._of if address), key=self.count, default="")


class Endings:
    """What ends requests whose connections are lost, a few in each turn of the event loop: a client that closes
    hundreds of streams at once would let everybody wait until all of them have ended.
    """

    def __init__(self):
        self._left: deque[Callable[[], None]] = deque()

    def add(self, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
        self._left.append(end)
        if len(self._left) == 1:
            loop.call_soon(self._end_few, loop)

    def _end_few(self, loop: asyncio.AbstractEventLoop) -> None:
        few = [self._left.popleft() for _ in range(min(FEW, len(self._left)))]
        if self._left:
            loop.call_soon(self._end_few, loop)
        for end in few:
            end()


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol on h11. What comes in is seen as h11 reads it: heads, parts and ends of bodies."""

    def __init__(self, all_connections: Connections, config: Any, **given: Any):
        super().__init__(config=config, **given)
        self.all, self.address = all_connections, ""
        self.waiting_since: float | None = None
        self._unread, self._unread_since = 0, 0.0
        self._chunks = self._bytes = 0
        most = config.h11_max_incomplete_event_size
        self.conn = WatchedConnection(self._see, **({"max_incomplete_event_size": most} if most else {}))

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, self.all.limits.unread_bytes)
        if not self.all.admit(self):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """A connection may have been accepted just before others of its address were refused: hundreds at once."""
        if self.cycle is None and not self.all.reads(self.address):
            self.transport.abort()
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.all.release(self)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # at once, so that nothing more is written
        self.all.endings.add(self.loop, partial(super().connection_lost, exc))

    def on_response_complete(self) -> None:
        self.all.wait(self)  # before the rest, which may read the next head
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request; in the middle of another answer only the connection can be closed. The app, which
        may be reading the body, answers nothing more.
        """
        self.all.note_malformed(self)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def check(self, now: float, limits: ConnectionLimits) -> None:
        """Close the connection if its time is over."""
        unread = self.transport.get_write_buffer_size()
        if not unread or unread < self._unread or not self._unread:
            self._unread_since = now
        self._unread = unread
        if unread and now - self._unread_since > limits.unread_seconds:
            self.transport.abort()
        elif not unread and self.waiting_since is not None and now - self.waiting_since > limits.head_seconds:
            self.transport.close()

    def _see(self, event: Any) -> None:
        """Raises h11.RemoteProtocolError for a body in too many small parts, and for one whose length is given twice: a
        proxy may see another end of it than h11.
        """
        if isinstance(event, h11.Request):
            if {b"content-length", b"transfer-encoding"} <= {name.lower() for name, _ in event.headers}:
                raise h11.RemoteProtocolError("the body has a length and chunks")
            self.all.go_on(self)
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            limits = self.all.limits
            if self._chunks > limits.chunks and self._bytes < limits.chunk_bytes * self._chunks:
                raise h11.RemoteProtocolError("the body comes in too many small chunks")


class WatchedConnection(h11.Connection):
    """h11's state of a connection, which shows each event that it reads."""

    def __init__(self, see: Callable[[Any], None], **given: int):
        super().__init__(h11.SERVER, **given)
        self._see = see

    def next_event(self) -> Any:
        event = super().next_event()
        self._see(event)
        return event


# --- what is logged ---

class RecentMessages:
    """Which messages were logged within the last QUIET seconds."""

    def __init__(self):
        self._until: dict[str, float] = {}

    def is_new(self, message: str) -> bool:
        now = monotonic()
        self._until = {known: until for known, until in self._until.items() if until > now}
        if message in self._until:
            return False
        self._until[message] = now + QUIET
        return True


class OnceAMinute(logging.Filter):
    """Drops repeated warnings: a client causes them as often as it likes. Errors with a traceback pass."""

    def __init__(self):
        super().__init__()
        self._recent = RecentMessages()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING or self._recent.is_new(str(record.msg))


class AcceptErrors:
    """asyncio's handler of errors in callbacks, with one line a minute where it would write thousands of tracebacks a
    second: no descriptors for new connections, which it tries to accept as often as there may be in its backlog.
    """

    def __init__(self):
        self._recent = RecentMessages()

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        reason = context.get("exception")
        if not isinstance(reason, OSError) or reason.errno not in EXHAUSTED:
            loop.default_exception_handler(context)
        elif self._recent.is_new(reason.strerror or ""):
            log.warning("New connections cannot be accepted (%s): raise `ulimit -n`.", reason.strerror)
