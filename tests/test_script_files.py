"""The scripts of the page's components are files that a browser fetches once."""
from __future__ import annotations

import asyncio

import httpx
import pytest
from app_page import address, browser, expect, page, status, tokens, visit  # noqa: F401
from starlette.applications import Starlette
from starlette.middleware import Middleware

from playground.ui.components.script_files import address_of, script_route
from playground.ui.guard.response_cache import ResponseCache

ONE, OTHER = "const a = 'ä';" * 100, "const b = 2;"


def fetched(path: str, **headers: str) -> httpx.Response:
    """The response of a site with both scripts."""
    app = Starlette(routes=[script_route([ONE, OTHER])], middleware=[Middleware(ResponseCache, pages=())])

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://site") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize("source", [ONE, OTHER])
def test_a_script_is_served_under_the_digest_of_its_text_and_kept_for_good(source):
    answer = fetched(address_of(source))
    assert answer.status_code == 200 and answer.text == source
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]


def test_a_script_is_sent_compressed():
    answer = fetched(address_of(ONE), **{"accept-encoding": "br"})
    assert answer.headers["content-encoding"] == "br" and int(answer.headers["content-length"]) < len(ONE) / 10


@pytest.mark.parametrize("path", ["/scripts/0000000000000000.js", "/scripts/..%2fapp.py", "/scripts/"])
def test_any_other_name_is_not_found(path):
    answer = fetched(path)
    assert answer.status_code == 404 and "const" not in answer.text


SIZES = """() => performance.getEntriesByType("resource").filter((entry) => entry.name.includes("/scripts/"))
    .map((entry) => entry.transferSize)"""


def test_a_second_visit_fetches_no_script_again(page, address):
    visit(page, address)
    first = page.evaluate(SIZES)
    assert len(first) == 2  # of the live view and of the lane editor
    visit(page, address)
    assert page.evaluate(SIZES) == [0, 0]


def test_where_a_site_does_not_serve_the_scripts_gradio_answers_with_them(page, address):
    another = {"status": 200, "content_type": "text/html", "body": "<p>another page"}
    page.route("**/scripts/*", lambda route: route.fulfill(**another))
    visit(page, address)
    expect(page.locator("#live .welcome, #live .lane").first).to_be_attached()
