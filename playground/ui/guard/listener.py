"""The socket on which the page accepts connections, a few in each turn of the event loop.

asyncio accepts all that wait, up to thousands, before anything else goes on, and makes six objects for each before its
address can be looked at. Here a connection of an address that is shut out is closed before any of that: a client that
comes back as soon as it is refused takes a thirtieth of the time.
"""
from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

FEW = 64  # connections that are accepted or closed in one turn of the event loop


class Listener(socket.socket):
    """The socket of another one, whose connections are closed at once unless `admits` their address."""

    def __init__(self, other: Any, admits: Callable[[str], bool]):
        super().__init__(fileno=other.dup().detach())
        self._admits, self._taken = admits, 0

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises BlockingIOError where none waits, and after FEW: the event loop then does what
        else is ready, and asks again in its next turn.
        """
        try:
            while self._taken < FEW:
                connection, address = super().accept()
                self._taken += 1
                if self._admits(address[0]):
                    return connection, address
                connection.close()
            raise BlockingIOError
        except BlockingIOError:
            self._taken = 0
            raise


async def listen(server: Any, admits: Callable[[str], bool]) -> None:
    """Let a running uvicorn server accept its further connections from a Listener of its port."""
    config = server.config

    def protocol() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=server.server_state,
                                          app_state=server.lifespan.state)

    before, server.servers = server.servers, []
    for old in before:
        for its_socket in old.sockets:
            listener = Listener(its_socket, admits)
            new = await asyncio.get_running_loop().create_server(protocol, sock=listener, ssl=config.ssl,
                                                                 backlog=config.backlog)
            server.servers.append(new)
        old.close()
