"""A run drawn in a browser from its stream, from Gradio where the stream is blocked, and from both where it breaks."""
from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from time import monotonic

import pytest
from app_page import tokens
from chromium import PATIENCE, chromium, new_context
from counting import Counting, counting_site
from playwright.sync_api import Page, Route, expect

from playground.ui.components.theme import theme_options
from playground.ui.server.pages import build
from playground.ui.server.run_streams import PLACE, RunStream
from playground.ui.server.serving import launch_options
from playground.ui.server.site import Site
from support.launched import launched

LENGTH, FIRST = 120, 3  # tokens of a run; those that it commits without being asked
FRAMES = f"**{PLACE}/*"


class Released(Counting):
    """Commits as many tokens as a test has released, so that what happens in the middle of a run does, on any machine.
    """

    def __init__(self):
        super().__init__([], length=LENGTH, forward=0.005)
        self.released = FIRST

    def advance(self) -> list:
        if self.count < self.released:
            return super().advance()
        self.stopped.wait(0.01)
        return []


@pytest.fixture(scope="module")
def begun() -> list[Released]:
    return []


@pytest.fixture(scope="module")
def site(begun: list[Released]) -> Site:
    return counting_site(lambda models, settings, memory: begun.append(Released()) or begun[-1])


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    demo = build(site)
    with launched(demo, **launch_options(site, demo, "127.0.0.1"), **theme_options()) as address:
        yield address


@pytest.fixture(scope="module")
def visitor(address: str) -> Iterator[Page]:
    with chromium() as browser:
        page = new_context(browser, viewport={"width": 1280, "height": 900}, reduced_motion="reduce").new_page()
        yield visit(page, address)


@pytest.fixture
def page(visitor: Page) -> Iterator[Page]:
    yield visitor
    visitor.unroute_all(behavior="ignoreErrors")


@pytest.fixture
def tab(visitor: Page, address: str) -> Iterator[Page]:
    """A visit of its own."""
    tab = visit(visitor.context.new_page(), address)
    yield tab
    tab.close()


@pytest.fixture
def breaks(monkeypatch) -> Callable[[int], list[int]]:
    """Lets the first so many connections break after one piece, when the next is due; returns the frame numbers that
    each connection begins with.
    """
    def start(connections: int) -> list[int]:
        asked, events = [], RunStream.events

        async def breaking(stream: RunStream, sent: int) -> AsyncIterator[bytes]:
            asked.append(sent)
            breaks, parts = len(asked) <= connections, 0
            async for part in events(stream, sent):
                parts += 1
                if breaks and parts > 2:  # the first one is the time to wait before a new connection
                    raise ConnectionResetError
                yield part

        monkeypatch.setattr(RunStream, "events", breaking)
        return asked

    return start


def visit(page: Page, address: str) -> Page:
    page.goto(address)
    expect(page.locator("#status .dot.ready")).to_be_visible()
    return page


def begin(page: Page, site: Site) -> RunStream:
    """Press Run; the stream of the run, once its first tokens are shown."""
    before = page.locator("#live .live").get_attribute("data-run")
    page.click("#run")
    expect(page.locator("#live .live")).not_to_have_attribute("data-run", before)
    expect(tokens(page, 0)).to_have_count(FIRST)
    return site.streams.find(page.locator("#live .live").get_attribute("data-run"))


def wait_until(page: Page, fact: Callable[[], bool]) -> None:
    end = monotonic() + PATIENCE
    while not fact():
        assert monotonic() < end
        page.wait_for_timeout(20)


def expect_whole(page: Page) -> None:
    """The run ends, and every token of it is shown once, in order."""
    expect(tokens(page, 0)).to_have_count(LENGTH)
    expect(page.locator("#run")).to_be_visible()
    shown = page.eval_on_selector_all("#live .lane .tokens > *", "spans => spans.map((span) => Number(span.dataset.i))")
    assert shown == list(range(LENGTH))


@pytest.mark.journey
def test_a_run_is_drawn_from_its_stream_and_gradio_brings_only_its_end(page, site, begun, monkeypatch):
    stream = begin(page, site)
    wait_until(page, lambda: stream.heard)
    carried, carry = [], RunStream.carry
    monkeypatch.setattr(RunStream, "carry", lambda stream, frame: carried.append(carry(stream, frame)) or carried[-1])
    begun[-1].released = LENGTH
    expect_whole(page)
    assert len(carried) > 3 and carried == [True] * (len(carried) - 1) + [False]


@pytest.mark.journey
def test_a_connection_that_breaks_in_the_middle_loses_and_doubles_nothing(page, site, begun, breaks):
    asked = breaks(3)
    stream = begin(page, site)
    for shown in range(FIRST, LENGTH, 20):
        begun[-1].released = shown
        expect(tokens(page, 0)).to_have_count(shown)
    begun[-1].released = LENGTH
    expect_whole(page)
    assert len(asked) == 4 and asked == sorted(set(asked)), "each connection began after what had arrived"
    assert stream.heard, "Gradio was not needed"


def refuse(route: Route) -> None:
    route.abort()


def never_answer(route: Route) -> None:
    """The request waits, as for a proxy that buffers."""


def find_nothing(route: Route) -> None:
    route.fulfill(status=404)


@pytest.mark.parametrize("block", [refuse, never_answer, find_nothing])
def test_where_the_stream_is_blocked_gradio_brings_the_run_and_the_next_ones_at_once(tab, site, begun, block):
    tab.route(FRAMES, block)
    stream = begin(tab, site)
    begun[-1].released = LENGTH
    expect_whole(tab)
    assert stream.heard is False
    tab.unroute_all(behavior="ignoreErrors")
    asked = []
    tab.route(FRAMES, lambda route: asked.append(route) or route.abort())
    stream = begin(tab, site)
    wait_until(tab, lambda: stream.heard is False)
    begun[-1].released = LENGTH
    expect_whole(tab)
    assert not asked, "a blocked stream is tried once in a visit"


def test_a_stream_that_breaks_for_good_is_replaced_by_gradio(page, site, begun, breaks):
    breaks(99)
    stream = begin(page, site)
    wait_until(page, lambda: stream.heard)
    page.route(FRAMES, refuse)
    begun[-1].released = LENGTH - 1  # the run goes on until it is known that the stream has gone
    expect(tokens(page, 0)).to_have_count(LENGTH - 1)
    assert not stream.heard
    begun[-1].released = LENGTH
    expect_whole(page)


def test_a_second_tab_gets_its_frames_by_gradio_while_the_first_has_a_stream(page, tab, site, begun):
    """Over HTTP/1.1 the tabs of a browser share six connections."""
    first = begin(page, site)
    wait_until(page, lambda: first.heard)
    second = begin(tab, site)
    begun[-1].released = LENGTH
    expect_whole(tab)
    assert second is not first and not second.heard
    begun[-2].released = LENGTH
    expect_whole(page)


def test_over_plain_http_where_tabs_cannot_agree_gradio_brings_the_run(page, site, begun):
    page.evaluate("Object.defineProperty(navigator, 'locks', { value: undefined, configurable: true })")
    stream = begin(page, site)
    begun[-1].released = LENGTH
    expect_whole(page)
    page.evaluate("delete navigator.locks")
    assert not stream.heard


def test_leaving_the_page_stops_the_run(page, site, address):
    tab = visit(page.context.new_page(), address)
    stream = begin(tab, site)
    wait_until(tab, lambda: stream.heard)
    tab.close()
    wait_until(page, lambda: stream.ended is not None and not stream.readers)
