"""The remote lane on the page, in a real browser."""
from __future__ import annotations

from app_page import address, browser, expect, open_settings, page, running, status, tokens, visit  # noqa: F401
from completion_server import Answer, CompletionServer, text

from playground.ui.components.settings import Settings


def connect(page, address: str, key: str = "") -> None:
    for name, value in {"address": address, "model": "fox", "key": key}.items():
        page.locator(f"#remote-{name} input, #remote-{name} textarea").fill(value)
    page.click("#remote-connect")


def test_a_server_generates_a_lane_beside_the_local_one(page, address):
    """First an address that is none, then a server, and in the next run the same server with another key."""
    refusing = Answer([b"{}"], 401, "application/json")
    with CompletionServer([text(" fox", " runs"), refusing]).running() as server:
        visit(page, address, Settings(prompt="The red", length=6))
        open_settings(page)
        page.locator("#remote > button, #remote .label-wrap").first.click()
        connect(page, "file:///etc/passwd")
        expect(page.locator("#remote-notice")).to_contain_text("is not the address of a server")
        connect(page, server.address, "sk-secret")
        expect(page.locator("#remote-notice")).to_contain_text("The next run has a lane of fox")
        expect(page.locator("#remote-key input")).to_have_value("")
        page.click("#run")
        expect(status(page, 1)).to_have_text("ended")
        expect(tokens(page, 1)).to_have_text([" fox", " runs"])
        expect(running(page, 1).locator(".badge")).to_have_text(["remote"])
        expect(running(page, 1).locator("[data-metric='target_forwards']")).to_be_hidden()
        running(page, 1).locator(".lane-name").click()
        expect(page.locator("#live .absent")).to_contain_text("not reported by the server: draft tree")
        tokens(page, 1).nth(0).click()
        expect(page.locator("#live .card")).to_contain_text("Top tokens, as the server reports them")
        expect(page.locator("#live .card")).not_to_contain_text("Write this here")
        assert "sk-secret" not in page.content() + page.url
        page.keyboard.press("Escape")
        page.click("#run")
        expect(running(page, 1).locator(".trouble")).to_contain_text("refuses the key")
        expect(status(page, 0)).to_have_text("reached the token limit")
