"""The live view of a canvas that takes tokens back: what a step struck out, and the marks that remain."""
from __future__ import annotations

from dataclasses import asdict

from live_page import address, browser, feed, numbers, page, seek, send, visitor  # noqa: F401
from playwright.sync_api import expect

from playground.events import Commit, Done, Fill, Forward
from playground.player.frames import frame, new_name
from playground.trace import check, metrics
from support.live_sequences import lane, run_of


def changing_its_mind() -> list:
    """Four steps: two positions, one of them replaced, the other masked again, and filled with the same token."""
    fills = [
        Fill([0, 1], [20, 21], [" a", " b"], [0.6, 0.7]),
        Fill([0, 2], [22, 23], [" c", " d"], [0.8, 0.9], replaced={0: " a"}),
        Fill([3], [24], [" e"], [0.9], remasked={1: " b"}),
        Fill([1], [21], [" b"], [0.95]),
    ]
    timed = [(0.2 * number, event) for number, fill in enumerate(fills, 1) for event in (Forward(tokens=4), fill)]
    commit = Commit(0, [22, 21, 23, 24], [" c", " b", " d", " e"], " c b d e", [None] * 4, ["sampled"] * 4)
    return [*timed, (1.0, commit), (1.0, Done("end"))]


REVISED = run_of(lane(0, changing_its_mind(), canvas=4))


def show(page, feed, share: float = 1.0) -> None:
    events, headers = [stamped.to_json() for stamped in REVISED.events], [asdict(one) for one in REVISED.headers]
    send(page, feed, frame(new_name(), 0, events, "done", headers))
    seek(page, share)


def cells(page) -> list[tuple[str, str | None]]:
    """Text and step of every position of the canvas."""
    shown = page.locator(".lane .is-canvas .cell").evaluate_all(
        "all => all.map((cell) => [cell.textContent.trim(), cell.dataset.step || null])"
    )
    return [tuple(cell) for cell in shown]


def test_a_step_strikes_out_the_token_that_it_replaces(page, feed):
    assert not check(REVISED)
    show(page, feed, 0.45)
    struck = page.locator(".lane .is-canvas .was")
    assert [text.strip() for text in struck.all_text_contents()] == ["a"]
    assert struck.get_attribute("title") == "taken back in step 2"
    assert page.locator(".lane .cell.revised").get_attribute("data-step") == "2"
    expect(page.locator(".panel-canvas .readout")).to_contain_text("filled 2 positions, 1 in place of another token")


def test_a_step_strikes_out_the_token_that_it_masks_again(page, feed):
    show(page, feed, 0.65)
    assert [text.strip() for text in page.locator(".lane .cell.open .was").all_text_contents()] == ["b"]
    expect(page.locator(".panel-canvas .readout")).to_contain_text("filled 1 position and masked 1 again, 3 of 4")
    assert numbers(page, 0)["tokens"] == 3


def test_the_text_and_the_grid_keep_the_marks_of_what_changed(page, feed):
    show(page, feed)
    assert cells(page) == [("c", "2"), ("b", "4"), ("d", "2"), ("e", "3")]
    assert [text.strip() for text in page.locator(".lane .cell.revised").all_text_contents()] == ["c", "b"]
    marks = page.locator(".panel-canvas .filled").evaluate_all(
        "all => all.map((one) => [one.dataset.position, one.dataset.step, one.classList.contains('revised')])"
    )
    assert sorted(marks) == [
        ["0", "1", False], ["0", "2", True], ["1", "1", False], ["1", "4", True], ["2", "2", False], ["3", "3", False]
    ]
    assert "before it held “a”" in page.locator(".panel-canvas .revised[data-position='0'] title").text_content()
    expect(page.locator(".panel-canvas .chart-key")).to_contain_text("in place of a token that was taken back")
    assert numbers(page, 0)["tokens"] == metrics(REVISED)["tokens"] == 4


def test_what_was_taken_back_ends_in_the_grid_where_it_was(page, feed):
    show(page, feed)
    height = "all => all.map((one) => Number(one.getAttribute('height')))"
    first, second = (
        page.locator(f".panel-canvas .filled[data-position='{i}'][data-step='1'] .since").evaluate_all(height)[0]
        for i in (0, 1)
    )
    assert second == 2 * first > 0  # replaced after one step, masked again after two
