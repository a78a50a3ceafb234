"""A stranger's requests do not push out a visitor's session."""
from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from playground.ui.guard.request_shares import CLIENT
from playground.ui.guard.visitor_sessions import VisitorSessions
from playground.ui.server.admission_queue import PAGE, AdmissionQueue, Visitor

MINE, STRANGER = "1.1.1.1", "6.6.6.6"


@contextmanager
def from_address(address: str):
    token = CLIENT.set(address)
    yield
    CLIENT.reset(token)


class Page:
    """A page with room for `most` sessions, `share` of one address."""

    def __init__(self, most: int = 8, share: int = 100):
        self.admission, self.streaming = AdmissionQueue(), set()
        self.sessions = VisitorSessions(self.admission, share, self.drop, lambda: self.streaming)
        config = SimpleNamespace(blocks={})
        self.sessions.set_blocks(SimpleNamespace(state_session_capacity=most, default_config=config, blocks={}))

    def drop(self, session: str) -> None:
        self.sessions.session_data.pop(session, None)
        self.sessions.forget(session)

    def visit(self, session: str, address: str = MINE) -> None:
        with from_address(address):
            self.sessions[session]

    def run(self, session: str):
        """A run of a session that has been begun; its ticket."""
        ticket = self.admission.join(PAGE, Visitor(session, MINE))
        self.visit(session)
        return ticket


def test_a_session_that_computes_waits_or_is_held_stays():
    page = Page()
    for session in ("computes", "is held"):
        page.visit(session)
        ticket = page.run(session)
    ticket.rest()
    for number in range(600):
        page.visit(f"new {number}", STRANGER)
    assert {"computes", "is held"} <= set(page.sessions.session_data) and len(page.sessions.session_data) == 8


def test_a_session_that_has_run_outlives_those_that_never_did():
    page = Page()
    page.visit("has run")
    page.run("has run").leave()
    for number in range(600):
        page.visit(f"new {number}", f"6.6.6.{number % 250}")
    assert "has run" in page.sessions and page.sessions["has run"] is not None


def test_a_page_that_was_just_opened_outlives_the_many_of_one_address():
    page = Page()
    page.visit("mine")
    for number in range(600):
        page.visit(f"new {number}", STRANGER)
    assert "mine" in page.sessions


def test_an_address_has_a_share_of_the_sessions():
    page = Page(most=20, share=4)
    for number in range(30):
        page.visit(f"new {number}", STRANGER)
    assert len(page.sessions.session_data) == 4 and "new 29" in page.sessions


def test_a_stream_keeps_its_session():
    page = Page(most=4)
    page.visit("streams", STRANGER)
    page.streaming.add("streams")
    for number in range(10):
        page.visit(f"new {number}")
    assert "streams" in page.sessions


@pytest.mark.parametrize("most, share, status", [(3, 100, 503), (100, 3, 429)])
def test_where_every_session_is_in_use_a_new_one_is_refused(most, share, status):
    page = Page(most, share)
    for number in range(3):
        page.visit(f"{number}")
        page.streaming.add(f"{number}")
    with pytest.raises(HTTPException) as refused:
        page.visit("another")
    assert refused.value.status_code == status and str(refused.value.detail).endswith(".")
    page.visit("0")  # those that there are go on


@pytest.mark.parametrize("name", ["a" * 129, 7, None, ["a"], {"a": 1}], ids=str)
def test_the_name_of_a_session_is_a_short_text(name):
    with pytest.raises(HTTPException) as refused:
        Page().visit(name)
    assert refused.value.status_code == 400


def test_nothing_is_left_of_a_deleted_session():
    page = Page(most=2)
    for number in range(9):
        page.visit(f"{number}")
        page.run(f"{number}").leave()
    assert page.sessions.owners.keys() == page.sessions.ran == page.sessions.session_data.keys()
    assert page.sessions.last_used.keys() == page.sessions.session_data.keys()
