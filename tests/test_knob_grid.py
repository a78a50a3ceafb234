"""A sweep over one or two knobs of a lane: the typed values, the lanes of the cells, and the panel that draws them."""
from __future__ import annotations

import re

import pytest
from app_page import address, browser, expect, open_settings, page, visit  # noqa: F401
from tables import TableModel

from playground.contract import find
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.request_limits import Rules
from playground.trace.knob_grid import cells, same_share
from playground.ui.components.settings import MOST_WRITTEN, Settings
from playground.ui.sweeps.knob_sweep import Axis, KnobSweep, axis, knobs_of, swept, values_of
from playground.ui.sweeps.knob_sweep_panel import GridProgress

SAMPLED = {"strategy": "sample", "knobs": {}, "extras": [["top_a", {"a": 0.1}]], "forced": []}
KNOBS = {knob.name: knob for knob in find("sample").knobs()}
TOP_K = Axis("sample.top_k", "Top k", [1, 3])
TOP_A = Axis("top_a.a", "A", [0.0, 0.5])


# --- values ---

@pytest.mark.parametrize(
    "knob, typed, values",
    [
        ("temperature", "0.2, 0.7,1.2", [0.2, 0.7, 1.2]),
        ("temperature", "0.5..1.5", [0.5, 0.75, 1.0, 1.25, 1.5]),
        ("temperature", "0.1 .. 0.3 by 0.1", [0.1, 0.2, 0.3]),
        ("temperature", "0.7, 0.70", [0.7]),
        ("top_k", "1..3", [1, 2, 3]),
        ("top_k", "1..10", [1, 4, 7, 10]),
        ("top_k", "4..4", [4]),
    ],
)
def test_values_are_typed_as_a_list_or_a_range(knob, typed, values):
    assert values_of(typed, KNOBS[knob]) == values


@pytest.mark.parametrize(
    "knob, typed, says",
    [
        ("temperature", "", "no values"),
        ("temperature", "warm", "must be a number"),
        ("temperature", "-1", "must be between"),
        ("temperature", "0.1, 0.2, 0.3, 0.4, 0.5, 0.6", "6 values; at most 5"),
        ("temperature", "0.1..1 by 0.01", "91 values; at most 5"),
        ("temperature", "1..0.5", "must go up"),
        ("temperature", "0.5..1 by nan", "must go up"),
        ("temperature", "0.5..1 by x", "must be a number"),
        ("top_k", "1..2 by 0.5", "whole number"),
        ("top_k", 3, "list of values"),
    ],
)
def test_values_that_a_knob_does_not_take_are_refused(knob, typed, says):
    with pytest.raises(Refusal, match=says):
        values_of(typed, KNOBS[knob])


# --- lanes ---

def test_the_cells_differ_in_their_two_knobs_alone():
    lanes = KnobSweep(TOP_K, TOP_A).lanes(SAMPLED)
    assert [(lane["knobs"]["top_k"], lane["extras"][0][1]["a"]) for lane in lanes] == [
        (1, 0.0), (1, 0.5), (3, 0.0), (3, 0.5)
    ]
    assert all(lane | SAMPLED == SAMPLED for lane in lanes) and SAMPLED["knobs"] == {}
    assert [lane["knobs"] for lane in KnobSweep(TOP_K, None).lanes(SAMPLED)] == [{"top_k": 1}, {"top_k": 3}]


def test_knobs_of_added_samplers_can_be_swept_too():
    assert {"sample.temperature", "sample.top_k", "top_a.a"} <= knobs_of(SAMPLED).keys()
    with pytest.raises(Refusal, match="no such knob"):
        axis(SAMPLED, "top_p.p", "0.5")
    with pytest.raises(Refusal, match="no knob"):
        axis({"strategy": "greedy"}, "greedy.x", "0.5")


@pytest.mark.parametrize(
    "values, length, rules, says",
    [
        ([1], 9, Rules(), "from 2 to 32 cells"),
        ([1, 2, 3, 4, 5], 9, Rules.for_visitors(), "from 2 to 8 cells, not 10"),
        ([1, 2, 3, 4], MOST_WRITTEN // 8 + 1, Rules(), "fewer values or tokens"),
    ],
)
def test_too_many_cells_are_refused(values, length, rules, says):
    sweep = KnobSweep(Axis("sample.top_k", "Top k", values), TOP_A if len(values) > 1 else None)
    with pytest.raises(Refusal, match=says):
        swept(Settings(prompt="x", length=length, lanes=[SAMPLED]), 0, sweep, rules)


# --- results ---

def test_the_share_of_a_text_ends_at_its_first_other_token():
    assert [same_share([1, 2, 3, 4], other) for other in ([1, 2, 3, 4], [1, 9, 3, 4], [1, 2], [9])] == [1, 0.25, 0.5, 0]
    assert same_share([], []) == 1


def ran(settings: Settings):
    session = prepare(Models(TableModel("abcde")), settings.configs(), Prompt("abc"), Limits(3, 6))
    list(session)
    return session.trace


def test_a_cell_gives_the_numbers_of_its_lane_run_alone():
    sweep = KnobSweep(TOP_K, None)
    settings = swept(Settings(prompt="abc", lanes=[SAMPLED]), 0, sweep, Rules())
    trace, progress = ran(settings), GridProgress(sweep, 6)
    progress.add([stamped.to_json() for stamped in trace.events])
    html = progress.draw(trace.to_json()["lanes"])
    assert {lane: (cell.text, cell.entropy) for lane, cell in progress.found.items()} == {
        lane: (cell.text, cell.entropy) for lane, cell in cells(trace).items()
    }
    assert not any(event.get("top") for event in progress.events)  # not kept: most of the size
    alone = cells(ran(Settings(lanes=settings.lanes[1:])))[0]
    assert (progress.found[1].text, progress.found[1].entropy) == (alone.text, pytest.approx(alone.entropy))
    assert progress.found[0].same == 1 and html.count("data-cell") == 2 and "6 tokens, length limit" in html


def test_a_cell_is_filled_when_its_lane_has_ended_and_texts_are_escaped():
    progress = GridProgress(KnobSweep(TOP_K, TOP_A), 6)
    commit = {"kind": "commit", "at": 1.0, "ids": [1], "pieces": ["<img>"], "text": "<img>", "origins": ["sampled"]}
    lane = {"logprobs": [None], "sequence": 0}
    progress.add([{**commit, **lane, "lane": 0, "seq": 0}, {**commit, **lane, "lane": 1, "seq": 1}])
    progress.add([{"kind": "done", "lane": 0, "seq": 2, "at": 2.0, "reason": "end"}])
    html = progress.draw([{"lane": number} for number in range(4)])
    assert "1 of 4 cells ended." in html and html.count("data-cell") == 1 and "1 tokens…" in html
    assert "&lt;img&gt;" in html and "<img" not in html and "0.5 tokens/s" in html


# --- on the page ---

def test_a_grid_is_run_and_a_cell_is_opened_as_a_lane(page, address):
    lanes = [{"strategy": "greedy"}, {"strategy": "sample"}]
    visit(page, address, Settings(prompt="The red fox", length=6, seed=2, lanes=lanes))
    open_settings(page)
    page.get_by_role("button", name="One lane, a grid of knobs").press("Enter")
    page.locator("#sweep-lane input").click()
    page.get_by_role("option", name="Lane 2", exact=True).click()
    expect(page.locator("#sweep-row-knob input")).to_have_value(re.compile("Temperature"))
    page.locator("#sweep-row-values input, #sweep-row-values textarea").fill("0.5, 1.5")
    page.click("#run-sweep")
    expect(page.locator("#swept [data-cell]")).to_have_count(2)
    expect(page.locator("#swept [data-cell='0']")).to_contain_text("100% equal")
    entropy = re.search(r"([\d.]+) nats", page.locator("#swept [data-cell='1']").text_content())[1]
    page.locator("#swept [data-cell='1']").click()
    expect(page.locator(".lane-card")).to_have_count(3)
    opened = page.locator("#live .lane").nth(2)
    expect(opened).to_have_attribute("aria-label", "Lane 3, Temperature 1.5 · Sampling")
    expect(opened).to_contain_text(re.compile(f"mean entropy ?{re.escape(entropy)}"))
