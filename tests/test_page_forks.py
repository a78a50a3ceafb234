"""Forks on the page: beside their lane, without a second run of the others, and undone; undo of what was changed."""

from app_page import address, browser, choose_strategy, expect, page, running, status, tokens, visit  # noqa: F401

from playground.ui.components.settings import Settings

LENGTH = 8


def texts(page) -> list[str]:
    return page.locator("#live .lane .tokens").all_text_contents()


def fork(page, lane: int, position: int) -> None:
    running(page, lane).locator(".tokens > .t").nth(position).click()
    page.locator("#live .card .candidate[data-id]:not([disabled])").first.click()


def hues(page) -> list[str]:
    colour = "all => all.map((one) => getComputedStyle(one).backgroundColor)"
    return page.locator("#live .lane .number").evaluate_all(colour)


def ended(page, lanes: int) -> None:
    expect(page.locator("#live [data-recorded='false'] .lane")).to_have_count(lanes)
    for lane in range(lanes):
        expect(status(page, lane)).to_have_text("reached the token limit")
        # a busy browser may have missed a frame, and gets the whole run again
        expect(running(page, lane).locator(".tokens > .t")).to_have_count(LENGTH)
    expect(page.locator("#run")).to_be_visible()


def test_a_fork_goes_beside_its_lane_and_undo_brings_the_lanes_and_their_run_back(page, address):
    lanes = [{"strategy": "greedy"}, {"strategy": "sample"}, {"strategy": "greedy"}]
    visit(page, address, Settings(prompt="The green bird", length=LENGTH, lanes=lanes))
    page.click("#run")
    ended(page, 3)
    before, first = texts(page), page.locator("#live .live").get_attribute("data-run")
    coloured = hues(page)
    assert len(set(coloured)) == 3
    fork(page, 0, 3)
    ended(page, 4)
    after = texts(page)
    assert [hues(page)[0], *hues(page)[2:]] == coloured, "each lane keeps its hue"
    assert hues(page)[1] not in coloured
    assert [after[0], *after[2:]] == before and after[1] != before[0]
    expect(page.locator("#live .lane .title").nth(1)).to_have_text("Greedy, forked at token 4")
    expect(page.locator(".lane-card[data-lane='1'] .forced")).to_have_text("forked at token 4")
    fork(page, 2, 1)
    page.locator("dialog.replacing .choice").nth(3).click()
    expect(page.locator("#live .lane .title").nth(3)).to_have_text("Sampling, forked at token 2")
    ended(page, 4)
    assert texts(page)[:3] == after[:3]
    page.locator("#settings .undo").click()
    expect(page.locator("#live .lane .title").nth(3)).to_have_text("Greedy")
    expect(page.locator(".lane-card[data-lane='3'] .forced")).to_have_count(0)  # the first undo has arrived
    expect(page.locator("#settings .undo")).to_be_enabled()
    page.locator("#settings .settings-open").focus()
    page.keyboard.press("Control+z")
    expect(page.locator("#live .live")).to_have_attribute("data-run", first)
    expect(page.locator(".lane-card")).to_have_count(3)
    assert texts(page) == before
    fork(page, 1, 2)
    expect(page.locator("#live .lane .title").nth(2)).to_have_text("Sampling, forked at token 3")
    ended(page, 4)
    live = page.locator("#live .live")
    forked = live.get_attribute("data-run")
    page.locator("#run").click()
    expect(live).not_to_have_attribute("data-run", forked)
    ended(page, 4)
    expect(page.locator("#live .lane .title").nth(2)).to_have_text("Sampling, forked at token 3")


def test_undo_takes_back_lanes_and_prompt_and_leaves_typing_to_the_text_field(page, address):
    visit(page, address, Settings(prompt="The green bird", length=LENGTH, lanes=[{"strategy": "greedy"}]))
    undo, prompt = page.locator("#settings .undo"), page.locator("#prompt textarea")
    expect(undo).to_be_disabled()
    choose_strategy(page, 0, "sample")
    expect(undo).to_be_enabled()
    undo.click()
    expect(page.get_by_label("Strategy of lane 1")).to_have_text("Greedy")
    expect(undo).to_be_disabled()
    prompt.fill("Another prompt")
    expect(undo).to_be_enabled()
    page.locator("#settings .settings-open").focus()
    page.keyboard.press("Control+z")
    expect(prompt).to_have_value("The green bird")
    prompt.focus()
    page.keyboard.type("x")
    page.keyboard.press("Control+z")
    expect(prompt).to_have_value("The green bird")


def test_running_lanes_go_on_beside_a_fork(page, address):
    lanes = [{"strategy": "greedy"}, {"strategy": "sample"}]
    visit(page, address, Settings(prompt="The green bird", length=4000, lanes=lanes))
    page.click("#run")
    expect(tokens(page, 1).nth(8)).to_be_attached()
    live = page.locator("#live .live")
    first = live.get_attribute("data-run")
    page.keyboard.press("Space")  # holds the run, so that nothing moves under the mouse
    fork(page, 0, 2)
    expect(live).not_to_have_attribute("data-run", first)
    expect(page.locator("#live .lane .title").nth(1)).to_have_text("Greedy, forked at token 3")
    for lane in range(3):
        before = tokens(page, lane).count()
        expect(tokens(page, lane).nth(before + 5)).to_be_attached()
    page.click("#stop")
    for lane in range(3):
        expect(status(page, lane)).to_have_text("stopped")


def test_a_run_from_before_a_reload_can_be_forked(page, address):
    lanes = [{"strategy": "greedy"}, {"strategy": "sample"}]
    visit(page, address, Settings(prompt="The green bird", length=LENGTH, lanes=lanes))
    page.click("#run")
    ended(page, 2)
    before = texts(page)
    page.reload()
    expect(page.locator("#live [data-recorded='false'] .lane")).to_have_count(2)
    fork(page, 1, 3)
    ended(page, 3)
    expect(page.locator("#live .lane .title").nth(2)).to_have_text("Sampling, forked at token 4")
    assert texts(page)[:2] == before and texts(page)[2] != before[1]
