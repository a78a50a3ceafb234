"""An ASGI middleware that answers requests to unknown functions of components; Gradio 6.31 fails on them.

It sits inside the request guard, which has read and checked the body.
"""
from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from playground.ui.guard.request_shares import Denied

PLACE = "/gradio_api/component_server"


def served_components(blocks: Iterable[Any]) -> dict[int, frozenset[str]]:
    """The functions that components offer to their scripts, by the number of the component."""
    found = {}
    for block in blocks:
        if names := frozenset(function.__name__ for function in getattr(block, "server_fns", ())):
            found[block._id] = names
    return found


class ComponentGuard:
    """Passes on a request only if it names a component, one of its functions and a session."""

    def __init__(self, app: ASGIApp, known: dict[int, frozenset[str]]):
        self.app, self.known = app, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_call = scope["type"] == "http" and scope["method"] == "POST"
        if not is_call or scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")).rstrip("/") != PLACE:
            await self.app(scope, receive, send)
            return
        whole = await receive()
        self._check(whole.get("body", b""))
        messages: list[Message] = [whole]

        async def read() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, read, send)

    def _check(self, body: bytes) -> None:
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            raise Denied(400, "The request must be a JSON object.") from None
        asked = asked if isinstance(asked, dict) else {}
        number, name = asked.get("component_id"), asked.get("fn_name")
        if type(number) is not int or not isinstance(name, str) or name not in self.known.get(number, ()):
            raise Denied(404, "There is no such component, or it has no such function: reload the page.")
        if not isinstance(asked.get("session_hash"), str) or "data" not in asked:
            raise Denied(400, "The request needs a session_hash, which is text, and data.")
