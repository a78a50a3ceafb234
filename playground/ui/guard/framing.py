"""Which other sites may show the page in a frame: none, unless PLAYGROUND_EMBED names them.

In a frame another site could lay its own page over the buttons. On a Space the hub's page shows the app in a frame.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from playground.errors import Refusal
from playground.request_limits import quoted

HUB = ("https://huggingface.co", "https://*.hf.space")
ORIGIN = re.compile(r"https?://(?:\*\.)?[\w.-]+(?::\d{1,5})?", re.ASCII)


def embedders(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The sites that may show the page in a frame, from the comma-separated PLAYGROUND_EMBED; `*` is any. Raises
    Refusal.
    """
    given = [name.strip() for name in environ.get("PLAYGROUND_EMBED", "").split(",") if name.strip() not in ("", "0")]
    for name in given:
        if name != "*" and not ORIGIN.fullmatch(name):
            raise Refusal(f"PLAYGROUND_EMBED contains {quoted(name)}: write addresses such as https://course.example, "
                          "separated by commas, or * for any site.", "embed")
    return (*given, *HUB) if "SPACE_ID" in environ else tuple(given)


class Framing:
    """ASGI middleware that tells browsers which sites may show a page in a frame."""

    def __init__(self, app: ASGIApp, sites: tuple[str, ...]):
        self.app = app
        self.policy = " ".join(["frame-ancestors", *(["*"] if "*" in sites else ["'self'", *sites])])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("content-security-policy", self.policy)
            await send(message)

        await self.app(scope, receive, framed if scope["type"] == "http" else send)
