"""A client of the request guard, without a socket."""
from __future__ import annotations

import asyncio

from playground.ui.guard.request_guard import RequestGuard


class Client:
    """One request whose body comes part by part; `answered` are the statuses of its answer."""

    def __init__(self, address: str, method: str = "POST", forwarded: str = ""):
        self.address, self.method, self.forwarded = address, method, forwarded
        self.parts: asyncio.Queue = asyncio.Queue()
        self.answered: list[int] = []

    def send(self, body: bytes, more: bool = True) -> None:
        self.parts.put_nowait({"type": "http.request", "body": body, "more_body": more})

    async def ask(self, guard: RequestGuard) -> None:
        headers = [(b"x-forwarded-for", self.forwarded.encode())] * bool(self.forwarded)
        scope = {"type": "http", "method": self.method, "path": "/gradio_api/upload", "headers": headers,
                 "client": (self.address, 1)}
        await guard(scope, self.parts.get, self._take)

    async def _take(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.answered.append(message["status"])
