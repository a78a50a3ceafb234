"""The scripts of the page's own components as files, so that a browser keeps them from one visit to the next.

A file is named by its content; playground.ui.guard.response_cache compresses it and lets the browser keep it for good.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

DIGITS = 16  # of the digest in a name
TYPE = "text/javascript"


def address_of(source: str) -> str:
    """Where the script is served, relative to the page."""
    return f"./scripts/{hashlib.sha256(source.encode()).hexdigest()[:DIGITS]}.js"


def script_route(sources: Iterable[str]) -> Route:
    """GET /scripts/NAME.js for these scripts; 404 for any other name."""
    known = {address_of(source): source for source in sources}

    async def answer(request: Request) -> Response:
        source = known.get(f"./scripts/{request.path_params['name']}")
        if source is None:
            return PlainTextResponse("There is no script of this name: reload the page.", 404)
        return Response(source, media_type=TYPE)

    return Route("/scripts/{name}", answer)
