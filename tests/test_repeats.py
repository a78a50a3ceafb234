"""One lane with many seeds: its texts and their frequencies, and the panel that shows them."""
from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from app_page import address, browser, expect, new_tab, open_settings, page, visit  # noqa: F401
from counting import Counting, open_page
from tables import TableModel

from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Commit, Done, Event, Failed, Header, Stamped, Step
from playground.request_limits import Rules
from playground.trace import Trace
from playground.trace.result import Result
from playground.trace.seed_sweep import outcomes
from playground.ui.components.settings import MOST_WRITTEN, Settings
from playground.ui.sweeps.seed_sweep_panel import SweepProgress, listing

LANES = [{"strategy": "greedy"}, {"strategy": "sample", "knobs": {"top_k": 9}}]
HOSTILE = "<img src=x onerror=window.hacked=1>${window.hacked=1}{{value}}"


# --- results ---

def wrote(*words: str, last: Event | None = None) -> list[Event]:
    tokens = [sum(map(ord, word)) for word in words]
    return [
        Commit(
            0,
            tokens,
            list(words),
            "".join(words),
            [-0.5 * (i + 1) for i in range(len(words))],
            ["sampled"] * len(words),
        ),
        last or Done("end"),
    ]


def sample_of(*lanes: list[Event], first: int = 5) -> Trace:
    headers = [Header(lane, seed=first + lane) for lane in range(len(lanes))]
    rows = [(lane, event) for lane, events in enumerate(lanes) for event in events]
    return Trace(headers, [Stamped(lane, seq, 0.0, event) for seq, (lane, event) in enumerate(rows)])


def test_equal_texts_are_counted_and_the_commonest_comes_first():
    found = outcomes(sample_of(wrote(" a", " b"), wrote(" a", " c"), wrote(" d"), wrote(" a", " c")))
    assert [(one.text, one.count, one.seeds, one.parts) for one in found] == [
        (" a c", 2, [6, 8], None),
        (" a b", 1, [5], 1),
        (" d", 1, [7], 0),
    ]
    assert [one.share for one in found] == [0.5, 0.25, 0.25]
    assert [one.logprob for one in found] == [-0.75, -0.75, -0.5]


def test_runs_that_wrote_no_whole_text_are_left_out():
    found = outcomes(
        sample_of(
            wrote(" a", last=Done("stopped")),
            wrote(" b", last=Failed("no")),
            wrote(" c", last=Done("length")),
            wrote(" a")[:1],
        )
    )
    assert [(one.text, one.share) for one in found] == [(" c", 1.0)]
    assert outcomes(sample_of([Failed("no")])) == []


def test_a_text_that_continues_beyond_another_branches_there():
    found = outcomes(sample_of(wrote(" a"), wrote(" a"), wrote(" a", " b")))
    assert [(one.text, one.parts) for one in found] == [(" a", None), (" a b", 1)]


def test_lanes_with_own_seeds_write_the_text_of_each_seed():
    model = Models(TableModel("abcde"))

    def ran(configs: list[LaneConfig], seed: int) -> Trace:
        session = prepare(model, configs, Prompt("abc"), Limits(seed, 5))
        list(session)
        return session.trace

    together = ran([LaneConfig("sample", seed=seed) for seed in range(4, 12)], 0)
    alone = [ran([LaneConfig("sample")], seed) for seed in range(4, 12)]
    assert [Result(together.lane(i)).token_ids for i in range(8)] == [Result(trace).token_ids for trace in alone]
    assert [header.seed for header in together.headers] == list(range(4, 12))
    assert len({tuple(Result(trace).token_ids) for trace in alone}) > 1
    assert sum(one.count for one in outcomes(together)) == 8


def test_zero_is_a_valid_seed_of_a_lane():
    session = prepare(
        Models(TableModel("abc")), [LaneConfig("sample", seed=0), LaneConfig("sample")], Prompt("abc"), Limits(7, 2)
    )
    assert [header.seed for header in session.headers] == [0, 7]


# --- requests ---

def test_a_lane_is_repeated_from_its_own_seed_or_from_the_runs():
    settings = Settings(prompt="x", seed=3, length=10, lanes=[*LANES, {"strategy": "sample", "seed": 40}])
    assert [config.seed for config in settings.repeated(1, 3, Rules()).configs()] == [3, 4, 5]
    assert [config.seed for config in settings.repeated(2, 2, Rules()).configs()] == [40, 41]
    assert {(config.strategy, config.knobs["top_k"]) for config in settings.repeated(1, 32, Rules()).configs()} == {
        ("sample", 9)
    }


@pytest.mark.parametrize(
    "lane, times, length, rules, says",
    [
        (2, 4, 9, Rules(), "no lane 3"),
        (-1, 4, 9, Rules(), "no lane 0"),
        (0, 33, 9, Rules(), "from 2 to 32"),
        (0, 1, 9, Rules(), "from 2 to 32"),
        (0, 2.5, 9, Rules(), "from 2 to 32"),
        (0, 9, 9, Rules.for_visitors(), "from 2 to 8"),
        (0, 32, MOST_WRITTEN // 32 + 1, Rules(), "fewer runs or tokens"),
    ],
)
def test_too_many_runs_are_refused_with_what_to_do(lane, times, length, rules, says):
    with pytest.raises(Refusal, match=says):
        Settings(prompt="x", length=length, lanes=LANES).repeated(lane, times, rules)


# --- reports ---

def summary(*lanes: list[Event], asked: int) -> str:
    trace, tally = sample_of(*lanes), SweepProgress(SimpleNamespace(lanes=[{}] * asked, length=4))
    tally.add([stamped.to_json() for stamped in trace.events])
    return tally.draw(
        [
            {"lane": header.lane, "seed": header.seed}
            for header in [*trace.headers, *(Header(lane) for lane in range(len(lanes), asked))]
        ]
    )


def test_progress_counts_what_ended_and_what_was_written():
    said = summary(wrote(" a", " b"), wrote(" a")[:1], asked=4)
    assert "1 of 4 runs ended, 3 tokens" in said and "value='0.250'" in said and said.count("<li") == 1


def test_runs_that_stopped_or_failed_are_distinguished_from_whole_ones():
    said = summary(wrote(" a"), wrote(" b", last=Done("stopped")), [Failed("Choose <another> draft.")], asked=3)
    assert "2 runs, 1 different text." in summary(wrote(" a"), wrote(" a"), asked=2)
    assert (
        "1 of 3 runs finished their text." in said
        and "Choose &lt;another&gt; draft." in said
        and said.count("<li") == 1
    )


def test_only_what_a_text_does_not_share_with_the_commonest_is_highlighted():
    html = listing(outcomes(sample_of(wrote(" a", " b"), wrote(" a", " b"), wrote(" a", HOSTILE))))
    assert (
        "<span class='same'></span> a b" in html
        and "<span class='same'> a</span>&lt;img" in html
        and "<img" not in html
    )
    assert re.findall(r"width:([\d.]+)%", html) == ["66.67", "33.33"] and "diverges from the first at token 2" in html
    assert listing([]) == ""


def test_step_details_are_not_stored_in_repeated_runs():
    tally = SweepProgress(SimpleNamespace(lanes=[{}], length=4))
    tally.add([Stamped(0, 0, 0.0, Step()).to_json(), Stamped(0, 1, 0.0, Commit(ids=[1], pieces=["x"])).to_json()])
    assert [event["kind"] for event in tally.events] == ["commit"]


# --- on the page ---

def open_panel(page, lane: str = "Lane 1", runs: int = 5):
    open_settings(page)
    page.get_by_role("button", name="One lane, many seeds").press("Enter")
    page.locator("#repeat-lane input").click()
    page.get_by_role("option", name=lane, exact=True).click()
    page.locator("#repeat-times input[type='number']").fill(str(runs))
    page.locator("#repeat-times input[type='number']").press("Tab")


def test_a_lane_is_run_many_times_and_its_texts_are_counted(page, address):
    visit(page, address, Settings(prompt="The red fox", length=6, seed=2, lanes=LANES))
    open_panel(page, "Lane 2", 5)
    page.click("#repeat")
    expect(page.locator("#repeated")).to_contain_text(re.compile(r"5 runs, \d different text"))
    counts = [int(text.split("×")[0]) for text in page.locator(".outcomes .facts b").all_text_contents()]
    assert sum(counts) == 5 and counts == sorted(counts, reverse=True)
    expect(page.locator("#live [data-recorded='false']")).to_have_count(0)  # the live view is not touched
    expect(page.locator("#repeat")).to_be_visible()


def test_deterministic_lanes_write_the_same_text_for_every_seed(page, address):
    visit(page, address, Settings(prompt="The red fox", length=6, lanes=LANES))
    open_panel(page, "Lane 1", 3)
    page.click("#repeat")
    expect(page.locator(".outcomes .facts")).to_have_text(re.compile(r"^3× 100%"))


def test_many_runs_are_stopped_at_once(page, address):
    visit(page, address, Settings(prompt="The red fox", length=2000, lanes=LANES))
    open_panel(page, "Lane 2", 4)
    page.click("#repeat")
    expect(page.locator("#repeated")).to_contain_text(re.compile(r"0 of 4 runs ended, [1-9]\d* tokens"))
    page.click("#repeat-stop")
    expect(page.locator("#repeated")).to_contain_text("0 of 4 runs finished their text.")
    expect(page.locator("#repeat")).to_be_visible()


def test_runs_that_cannot_be_repeated_say_so_in_the_panel(page, address):
    visit(page, address, Settings(prompt="The red fox", length=6, lanes=LANES))
    open_panel(page, "Lane 4", 3)
    page.click("#repeat")
    expect(page.locator("#repeated")).to_contain_text("There is no lane 4 to repeat")
    expect(page.locator("#repeat")).to_be_visible()


class Saying(Counting):
    """A session whose lanes write one text and end."""

    def __init__(self, settings: Settings):
        super().__init__([])
        self.trace = sample_of(*([wrote(" a"), wrote(HOSTILE)][i % 2] for i in range(len(settings.lanes))))

    def advance(self) -> list[Stamped]:
        self.finished = True
        return self.trace.events


def test_model_output_is_shown_as_text(new_tab):
    with open_page(lambda models, settings, memory: Saying(settings)) as address:
        page = new_tab()
        visit(page, address, Settings(prompt="The red fox", lanes=LANES))
        open_panel(page, "Lane 1", 3)
        page.click("#repeat")
        expect(page.locator(".outcomes .text").last).to_have_text(HOSTILE)
        assert page.locator(".outcomes img").count() == 0 and page.evaluate("window.hacked") is None
