"""A run drawn in a browser from its stream, from Gradio where the stream is blocked, and from both where it breaks."""
from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from time import monotonic

import pytest
from app_page import tokens
from chromium import PATIENCE, chromium, new_context
from counting import Counting, counting_site
from playwright.sync_api import Page, Route, expect

from playground.ui.pages import build
from playground.ui.run_streams import PLACE, RunStream
from playground.ui.serving import launch_options
from playground.ui.site import Site
from playground.ui.theme import theme_options

LENGTH = 300  # tokens of a run: several seconds
FRAMES = f"**{PLACE}/*"


@pytest.fixture(scope="module")
def site() -> Site:
    return counting_site(lambda models, settings, memory: Counting([], length=LENGTH, forward=0.02))


@pytest.fixture(scope="module")
def address(site: Site) -> Iterator[str]:
    demo = build(site)
    yield demo.launch(
        prevent_thread_lock=True, quiet=True, run_history=False, **launch_options(site, "127.0.0.1"), **theme_options()
    )[1]
    demo.close()


@pytest.fixture(scope="module")
def visitor(address: str) -> Iterator[Page]:
    with chromium() as browser:
        page = new_context(browser, viewport={"width": 1280, "height": 900}, reduced_motion="reduce").new_page()
        page.goto(address)
        expect(page.locator("#status .dot.ready")).to_be_visible()
        yield page


@pytest.fixture
def page(visitor: Page) -> Iterator[Page]:
    yield visitor
    visitor.unroute_all(behavior="ignoreErrors")


def begin(page: Page) -> str:
    """Press Run; the name of the run, once it has some tokens."""
    before = page.locator("#live .live").get_attribute("data-run")
    page.click("#run")
    expect(page.locator("#live .live")).not_to_have_attribute("data-run", before)
    expect(tokens(page, 0).nth(2)).to_be_attached()
    return page.locator("#live .live").get_attribute("data-run")


def expect_whole(page: Page) -> None:
    """The run has ended, and every token of it is shown once, in order."""
    expect(page.locator("#run")).to_be_visible()
    expect(tokens(page, 0)).to_have_count(LENGTH)
    shown = page.eval_on_selector_all("#live .lane .tokens > *", "spans => spans.map((span) => Number(span.dataset.i))")
    assert shown == list(range(LENGTH))


def test_a_run_is_drawn_from_its_stream_and_gradio_brings_no_more_of_it(page, site, monkeypatch):
    carried, carry = [], RunStream.carry
    monkeypatch.setattr(RunStream, "carry", lambda stream, frame: carried.append(carry(stream, frame)) or carried[-1])
    stream = site.streams.find(begin(page))
    expect_whole(page)
    assert stream.heard and stream.ended is not None and stream.readers == 0
    first = carried.index(True)
    assert first < len(carried) / 2 and carried[first:-1] == [True] * (len(carried) - first - 1) and not carried[-1]


@pytest.fixture
def breaks(monkeypatch) -> Callable[[int], list[int]]:
    """Lets the first so many connections break after a few pieces; returns the frame numbers asked for, in order."""
    def start(connections: int) -> list[int]:
        asked, events = [], RunStream.events

        async def breaking(stream: RunStream, sent: int) -> AsyncIterator[bytes]:
            asked.append(sent)
            parts = 0
            async for part in events(stream, sent):
                parts += 1
                if len(asked) <= connections and parts > 5:
                    raise ConnectionResetError
                yield part

        monkeypatch.setattr(RunStream, "events", breaking)
        return asked

    return start


def test_a_connection_that_breaks_in_the_middle_loses_and_doubles_nothing(page, site, breaks):
    asked = breaks(3)
    stream = site.streams.find(begin(page))
    expect_whole(page)
    assert len(asked) == 4 and asked == sorted(set(asked)), "each connection began after what had arrived"
    assert stream.heard, "Gradio was not needed"


@pytest.mark.parametrize("block", [Route.abort, lambda route: None, lambda route: route.fulfill(status=404)],
                         ids=["refused", "never answered", "not found"])
def test_where_the_stream_is_blocked_gradio_brings_the_run(page, site, block):
    page.route(FRAMES, block)
    stream = site.streams.find(begin(page))
    expect_whole(page)
    assert not stream.heard


def test_a_stream_that_breaks_for_good_is_replaced_by_gradio(page, site, breaks):
    breaks(1)
    stream = site.streams.find(begin(page))
    page.route(FRAMES, Route.abort)
    expect_whole(page)
    assert not stream.heard


def test_a_second_tab_gets_its_frames_by_gradio_while_the_first_has_a_stream(page, site, address):
    """Over HTTP/1.1 the tabs of a browser share six connections."""
    first = site.streams.find(begin(page))
    second = page.context.new_page()
    second.goto(address)
    run = begin(second)
    if first.ended is None:
        assert not site.streams.find(run).heard
    expect_whole(second)
    second.close()
    expect_whole(page)


def test_leaving_the_page_stops_the_run(page, address, site):
    tab = page.context.new_page()
    tab.goto(address)
    stream = site.streams.find(begin(tab))
    tab.close()
    end = monotonic() + PATIENCE
    while stream.ended is None or stream.readers:
        assert monotonic() < end
        page.wait_for_timeout(50)
    assert b'"state":"done"' not in b"".join(stream.log.frames)
