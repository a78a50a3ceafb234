"""Texts that were given, and looks inside, on the real page over small random models."""
from __future__ import annotations

import re

from app_page import TWO_LANES, address, browser, expect, open_settings, page, running, status, tokens, visit  # noqa: F401
from pairs import pair

from playground.ui.components.settings import Settings
from playground.ui.server import gpu_work, page_runs
from playground.ui.server.site import Site
from playground.ui.server.zero_gpu import RemoteRun

TEXT = Settings(prompt="The green bird sings, and the red fox listens.", length=12, lanes=[{"strategy": "greedy"}])


def score(page, address, settings: Settings = TEXT) -> None:
    visit(page, address, settings)
    open_settings(page)
    page.click("#score")
    expect(running(page, 1)).to_be_attached()
    for lane in (0, 1):
        expect(status(page, lane)).to_have_text("ended")


def test_a_text_is_scored_by_both_models_and_nothing_is_added(page, address):
    score(page, address)
    for lane in (0, 1):
        first = running(page, lane).locator(".prompt").text_content()
        assert first + "".join(tokens(page, lane).all_text_contents()) == TEXT.prompt
        assert all(
            "unknown" not in look for look in tokens(page, lane).evaluate_all("all => all.map((t) => t.className)")
        )
    expect(page.locator("#run")).to_be_visible()


def test_a_scored_token_has_its_rivals_but_begins_no_fork(page, address):
    score(page, address)
    tokens(page, 0).nth(2).click()
    rivals = page.locator("#live .card .candidate")
    assert rivals.count() >= 10
    assert not [i for i in range(rivals.count()) if rivals.nth(i).is_enabled()]


def test_scoring_ends_the_run_it_follows_and_a_run_can_follow_it(page, address):
    visit(page, address, TWO_LANES)
    page.click("#run")
    expect(tokens(page, 0).nth(5)).to_be_attached()
    open_settings(page)
    page.click("#score")
    expect(running(page, 0).locator(".title").first).to_contain_text("reads it")
    expect(status(page, 0)).to_have_text("ended")
    page.click("#run")
    expect(running(page, 0).locator(".title").first).to_have_text("Greedy")
    expect(tokens(page, 0).nth(5)).to_be_attached()
    page.click("#stop")


def test_an_empty_text_gets_a_sentence_beside_it(page, address):
    visit(page, address, Settings(prompt="a", lanes=[{"strategy": "greedy"}]))
    open_settings(page)
    page.click("#score")
    expect(page.locator("#prompt-notice")).to_contain_text("write at least two")


def test_a_look_inside_ends_where_the_card_of_the_token_begins(page, address):
    visit(page, address, TEXT)
    page.click("#run")
    expect(tokens(page, 0).nth(11)).to_be_attached()
    tokens(page, 0).nth(4).click()
    likeliest = page.locator("#live .card .candidate").first
    expected = likeliest.locator(".raw.num").inner_text(), int(likeliest.get_attribute("data-id"))
    page.locator("#live .card .look").click()
    rows = page.locator("#live .panel-inside .lens tr")
    expect(rows).to_have_count(4)  # a heading, the embedding and two layers
    last = rows.last
    assert last.locator(".num").first.inner_text() == expected[0], "greedy chose the likeliest token"
    expect(last.locator(".said").first).to_have_class(re.compile("is-chosen"))
    expect(page.locator("#live .panel-inside .shaded .t")).to_have_count(
        page.locator("#live .lane .prompt .p").count() + 4
    )


def test_one_can_look_inside_while_lanes_write(page, address):
    visit(page, address, TWO_LANES)
    page.click("#run")
    expect(tokens(page, 1).nth(8)).to_be_attached()
    page.locator("#live .play").click()  # what is held can be pointed at
    tokens(page, 1).nth(3).click()
    page.locator("#live .card .look").click()
    expect(page.locator("#live .panel-inside h3")).to_have_text("Look inside: lane 2, token 4")
    page.click("#stop")


def test_a_borrowed_gpu_scores_and_looks_too(monkeypatch):
    for module in (page_runs, gpu_work):
        monkeypatch.setattr(module, "on_zero", lambda: True)
    site = Site(load=lambda *names, **how: pair())
    run = site.runs.read(site.chosen.load(TEXT), TEXT)
    assert isinstance(run, RemoteRun)
    list(run.frames())
    assert [header["model"] for header in run.headers] == [pair().target.name, pair().draft.name]
    looks = [site.runs.look(TEXT, header["model"], [5, 9, 2], 3)["layers"][-1]["chosen"] for header in run.headers]
    assert looks[0] != looks[1], "each lane is looked into with its own model"
