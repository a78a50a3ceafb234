"""The benchmark page: in a real browser over small random models, and its parts by themselves."""
from __future__ import annotations

import csv
import io
import json
import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from app_page import browser, expect  # noqa: F401
from pairs import pair
from playwright.sync_api import Page

from playground.bench.spread import Spread
from playground.bench.survey.results import COLUMNS, ResultRow, Score
from playground.bench.survey.survey import Answer, Entrant, survey
from playground.cli.lane_options import read_lane
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.questions.questions import ask
from playground.questions.user_questions import LONGEST, questions_in
from playground.questions.world import TASKS
from playground.request_limits import Rules
from playground.ui.benchmark import benchmark_page as benchmark
from playground.ui.benchmark.results_table import MEANINGS, answers_to, table_value
from playground.ui.benchmark.survey_run import (
    MOST_LETTERS,
    SurveySession,
    SurveySettings,
    judge_for,
    survey_session,
    written,
)
from playground.ui.benchmark.survey_visit import Forecast, SurveyVisit
from playground.ui.components.settings import WIDEST, Settings
from playground.ui.components.theme import theme_options
from playground.ui.play import gallery
from playground.ui.server.pages import build
from playground.ui.server.site import Site
from playground.ui.server.worker import Worker
from support.launched import launched

pytestmark = pytest.mark.bench

GREEDY, GUESSING, NEEDY = (
    {"strategy": "greedy"},
    {"strategy": "speculative", "extras": [["draft_model", {"depth": 3}]]},
    {"strategy": "greedy", "extras": [["cad", {}]]},
)  # cad wants a passage, which these questions do not have
OWN = (
    '{"task": "birds", "prompt": "The green bird", "answer": "x"}\n{"task": "foxes", "prompt": "The red fox", "answer":'
    ' "e", "contains": true}\n'
)
TWO = SurveySettings(lanes=[GREEDY, GUESSING, NEEDY], tasks=[], own=OWN, length=12, repeats=2, seed=3)
ENDLESS = replace(TWO, lanes=[GREEDY, GUESSING], repeats=999)
HOSTILE = "<img src=x onerror=window.hacked=1>${window.hacked=1}{{value}}"


@pytest.fixture(scope="module")
def address():
    """The whole site over random models, in this process."""
    with launched(build(Site(load=lambda *names, **how: pair())), **theme_options()) as address:
        yield address


@contextmanager
def tab(browser):  # noqa: F811
    """A visitor's empty tab; no script may break in it."""
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    page.close()
    assert not wrong


@pytest.fixture
def page(browser):  # noqa: F811
    with tab(browser) as page:
        yield page


@pytest.fixture(scope="module")
def asked(browser, address):  # noqa: F811
    """A tab in which a survey has come to its end."""
    with tab(browser) as page:
        visit(page, address)
        ran(page)
        page.get_by_text("Questions and answers").click()
        yield page


def visit(page: Page, address: str, choice: SurveySettings = TWO) -> None:
    page.goto(f"{address}benchmark?s={choice.to_code()}")
    expect(page.locator(".lane-card")).to_have_count(len(choice.lanes))
    expect(page.locator("#length input")).to_have_value(str(choice.length))


def ran(page: Page) -> None:
    page.click("#run")
    expect(page.locator("#progress")).to_contain_text(re.compile(r"[\d,]+ of [\d,]+ answers\."))
    expect(page.locator("#run")).to_be_visible()


def saved(page: Page, name: str) -> str:
    with page.expect_download() as download:
        page.get_by_role("button", name=name).click()
    return Path(download.value.path()).read_text(encoding="utf-8")


def cells(page: Page) -> list[list[str]]:
    """The rows of the table in order, without failures."""
    rows = page.locator(".results-table [data-task] tr[data-row]")
    return rows.evaluate_all(
        "rows => rows.map((row) => [...row.cells].map((cell) => (cell.querySelector('.entrant') || cell).textContent))"
    )


def row(given_row: dict) -> ResultRow:
    kinds = {"score": Score, "tokens_per_second": Spread, "time_ratio": Spread}
    return ResultRow(
        **{name: kinds[name](**value) if name in kinds and value else value for name, value in given_row.items()}
    )


# --- in a browser ---

def test_no_control_lies_over_another(asked):
    add, models = (asked.locator(part).bounding_box() for part in (".add-lane", ".models"))
    assert add["y"] >= models["y"] + models["height"]
    label = asked.locator(".survey .models > .label-wrap")
    assert label.evaluate("label => parseFloat(getComputedStyle(label).paddingLeft)") >= 8  # off its border


def test_two_questions_are_answered_and_the_table_equals_the_file(asked):
    expect(asked.locator("#progress")).to_have_text("12 of 12 answers.")
    document = json.loads(saved(asked, "Save all as JSON"))
    written = [[cell(row(one)) for cell in COLUMNS.values()] for one in document["table"]]
    assert cells(asked) == [["" if text == "-" else text for text in line] for line in written], "no dashes on the page"
    assert [one["entrant"] for one in document["table"]] == [
        "greedy",
        "speculative+draft_model:depth=3",
        "greedy+cad",
    ] * 2
    assert document["settings"]["model"] == "llama" and document["machine"]["torch"] and len(document["answers"]) == 12
    lines = [*csv.DictReader(io.StringIO(saved(asked, "Save answers as CSV"), newline=""))]
    assert [(line["entrant"], line["text"]) for line in lines] == [
        (one["entrant"], one["text"]) for one in document["answers"]
    ]
    note = asked.locator(".results-table .note").filter(has_text="Measured with")
    expect(note).to_contain_text("Measured with llama")
    expect(asked.locator("#figures .js-plotly-plot")).to_have_count(2)


def test_a_single_question_shows_every_answer(asked):
    expect(asked.locator(".asked tbody tr").nth(1).locator(".mark")).to_have_count(3)
    asked.get_by_role("button", name="2 The red fox").click()
    shown = asked.locator(".one-question")
    expect(shown.locator("h3")).to_have_text("Question 2, foxes")
    given = survey(pair(), TWO.entrants(), TWO.questions(Rules()), 1, Limits(TWO.seed, TWO.length), warm_up=False)
    texts = {answer.entrant: answer.text for answer in given if answer.number == 1 and not answer.lacking}
    assert len(texts) == 2
    for name, text in texts.items():
        section = shown.locator("section").filter(has=asked.get_by_role("heading", name=name, exact=True))
        assert section.locator("pre").first.text_content() == text
        expect(section.locator(".facts b").first).to_have_text("right" if "e" in text else "wrong")
    expect(shown.locator("section").last).to_contain_text("Not asked: the question does not provide a passage.")


def test_the_table_sorts_by_any_column_with_missing_values_last(asked):
    unsorted, heading = cells(asked), asked.locator(".results-table th", has_text="target forwards")
    for order, reverse in (("descending", True), ("ascending", False)):
        heading.locator("button").click()
        expect(heading).to_have_attribute("aria-sort", order)
        *forwards, nothing = [line[3] for line in cells(asked)[:3]]
        assert forwards == sorted(forwards, reverse=reverse) and nothing == ""
    heading.locator("button").click()
    expect(heading).to_have_attribute("aria-sort", "none")
    assert cells(asked) == unsorted


def test_a_strategy_that_cannot_run_says_so_in_its_row(asked):
    expect(asked.locator("[data-task='birds'] tr[data-row='2'] .note")).to_contain_text("does not provide a passage")
    assert cells(asked)[2][-1] == "" and [line[2] for line in cells(asked)[:2]] == ["12", "12"]


def test_nothing_overflows_on_a_phone_or_a_desktop(asked):
    for width in (390, 1440):
        asked.set_viewport_size({"width": width, "height": 900})
        assert asked.evaluate("document.documentElement.scrollWidth <= innerWidth"), width


def test_a_copied_link_opens_the_same_choice(asked):
    asked.click("#share")
    expect(asked.locator("#share")).not_to_have_text("Copy link")
    assert SurveySettings.from_code(
        asked.evaluate("new URLSearchParams(location.search).get('s')")
    ) == SurveySettings.from_code(TWO.to_code())


def test_it_is_stopped_within_a_question_and_shows_how_far_it_came(page, address):
    visit(page, address, ENDLESS)
    page.click("#run")
    expect(page.locator(".results-table tr[data-row='1']").first).to_be_visible()
    expect(page.locator("#progress")).to_contain_text("left")
    page.click("#stop")
    expect(page.locator("#progress")).to_contain_text(re.compile(r"Stopped after [\d,]+ of 3,996 answers"))
    expect(page.locator("#run")).to_be_visible()
    expect(page.locator("#figures .js-plotly-plot").first).to_be_visible()


@pytest.mark.parametrize("strategy, says", [
    ("masked_diffusion", "continues text and cannot fill masked positions: choose pocket-diffusion"),
    ("medusa", "medusa has not been fitted to llama yet: run `python -m playground fit medusa`")])
def test_a_lane_that_its_models_cannot_run_is_refused_before_any_question_is_asked(page, address, strategy, says):
    lane = {"strategy": "speculative", "extras": [[strategy, {}]]} if strategy == "medusa" else {"strategy": strategy}
    visit(page, address, replace(TWO, lanes=[GREEDY, lane]))
    page.click("#run")
    expect(page.locator("#lanes-notice")).to_contain_text("Lane 2 cannot start.")
    expect(page.locator("#lanes-notice")).to_contain_text(says)
    expect(page.locator("#run")).to_be_visible()
    assert page.locator(".results-table tr[data-row]").count() == 0


def test_lines_that_are_no_questions_are_named_beside_them(page, address, tmp_path):
    (tmp_path / "bad.jsonl").write_text(OWN + '{"prompt": 3}\n')
    (tmp_path / "good.jsonl").write_text(OWN)
    visit(page, address, replace(TWO, own=""))
    page.locator("#brought .label-wrap").click()
    page.locator("#brought input[type='file']").set_input_files(tmp_path / "bad.jsonl")
    expect(page.locator("#own-notice")).to_contain_text("Line 3 of bad.jsonl: prompt must be a text")
    page.locator("#brought input[type='file']").set_input_files(tmp_path / "good.jsonl")
    expect(page.locator("#own textarea")).to_have_value(OWN)
    expect(page.locator("#own-notice p")).to_be_empty()
    page.locator("#own textarea").fill("{")
    page.click("#run")
    expect(page.locator("#own-notice")).to_contain_text("Line 1 of your questions is not JSON")
    page.locator("#own textarea").fill("")
    page.click("#run")
    expect(page.locator("#questions-notice")).to_contain_text("There is no question to ask")
    expect(page.locator("#own-notice p")).to_be_empty()
    expect(page.locator("#run")).to_be_visible()


def test_untrusted_text_is_shown_as_text(page, address):
    own = json.dumps(
        {"prompt": f"The red fox {HOSTILE}", "task": HOSTILE[: LONGEST["task"]], "context": HOSTILE, "answer": HOSTILE}
    )
    lanes = [{"strategy": "greedy", "extras": [["choice", {"options": f" a{HOSTILE}|{HOSTILE}"}]]}, NEEDY]
    visit(page, address, replace(TWO, lanes=lanes, own=own, repeats=1, length=60))
    ran(page)
    expect(page.locator(".results-table .task")).to_have_text(HOSTILE[:LONGEST["task"]])
    page.get_by_text("Questions and answers").click()
    page.locator(".asked tbody button").click()
    expect(page.locator(".one-question dd").nth(1)).to_have_text(f"The red fox {HOSTILE}")
    expect(page.locator(".one-question")).to_contain_text(f"greedy+choice:options= a{HOSTILE}"[:60])
    for place in ("#results-table", "#answers", "#figures"):
        assert page.locator(f"{place} img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_a_visitor_who_leaves_frees_the_seat(browser, address):  # noqa: F811
    with tab(browser) as second:
        with tab(browser) as first:
            for page in (first, second):
                visit(page, address, ENDLESS)
            first.click("#run")
            expect(first.locator(".results-table tr[data-row]").first).to_be_visible()
            second.click("#run")
            expect(second.locator("#progress")).to_contain_text("Place 1 in the queue")
        expect(second.locator(".results-table tr[data-row]").first).to_be_visible()
        second.click("#stop")
        expect(second.locator("#run")).to_be_visible()


# --- what a visitor chose ---

def test_a_link_carries_the_whole_choice_and_nothing_that_does_not_fit():
    choice = SurveySettings.read(
        {"lanes": [GREEDY] * 12, "tasks": ["lists", 3, "facts", "nonsense"], "count": "9", "own": OWN, "repeats": 5}
    )
    assert (len(choice.lanes), choice.tasks, choice.count, choice.repeats) == (
        WIDEST,
        ["facts", "lists"],
        SurveySettings().count,
        5,
    )
    assert SurveySettings.from_code(choice.to_code()) == choice
    assert SurveySettings.from_code(replace(choice, own="x" * (MOST_LETTERS + 1)).to_code()).own == ""
    assert len(Settings.read({"lanes": [GREEDY] * 12}).lanes) == 4


@pytest.mark.parametrize(
    "change, about",
    [
        ({"lanes": []}, "lanes"),
        ({"tasks": []}, "questions"),
        ({"count": None}, "count"),
        ({"count": 0}, "count"),
        ({"repeats": 1.5}, "repeats"),
        ({"length": 300}, "length"),
        ({"seed": -1}, "seed"),
        ({"own": " " * 1_000_001}, "file"),
        ({"count": 40}, "count"),
        ({"own": "{"}, "file"),
        ({"own": json.dumps({"prompt": "x" * 5000})}, "file"),
    ],
)
def test_what_is_not_allowed_on_a_public_page_is_refused_at_its_control(change, about):
    choice, rules = replace(SurveySettings(lanes=[GREEDY, GUESSING]), **change), Rules.for_visitors()
    with pytest.raises(Refusal) as refused:
        choice.check(rules)
        choice.questions(rules)
    assert refused.value.about == about


def test_a_lane_is_not_refused_for_a_question_that_is_too_long_or_lacks_an_input():
    huge = json.dumps({"task": "long", "prompt": "x" * 3000}) + "\n"  # more than these models can read
    for own in (OWN, huge):
        assert survey_session(pair(), replace(TWO, own=own), Rules())


def test_what_the_page_begins_with_is_allowed_everywhere():
    choice = SurveySettings(lanes=benchmark.LANES)
    choice.check(Rules.for_visitors())
    assert len(choice.questions(Rules.for_visitors())) == len(choice.tasks) * choice.count


def test_questions_of_different_kinds_take_turns_and_ones_own_come_last():
    asked = SurveySettings(tasks=["facts", "lists"], count=2, own=OWN).questions(Rules())
    assert [question.task for question in asked] == ["facts", "lists", "facts", "lists", "birds", "foxes"]


def test_entrants_have_names_that_a_shell_reads_and_no_two_the_same():
    lanes = [
        GREEDY,
        GUESSING,
        {**GREEDY, "seed": 4},
        {"strategy": "greedy", "extras": [["regex", {"pattern": "a" * 500}]]},
    ]
    names = [entrant.name for entrant in SurveySettings(lanes=lanes).entrants()]
    assert names[:3] == ["greedy", "speculative+draft_model:depth=3", "greedy #2"] and len(names[3]) == 90
    assert written(read_lane(names[1])) == names[1]


def test_a_program_that_may_not_be_run_is_not_judged():
    program, fact = ask("programs", 1, 1)[0], ask("facts", 1, 1)[0]
    assert (
        judge_for(Rules(programs=False))(program, program.answer) is None
        and judge_for(Rules())(program, program.answer) == 1.0
    )
    assert judge_for(Rules(programs=False))(fact, fact.answer) == 1.0


def test_every_task_and_every_column_has_words():
    assert set(gallery.TASKS) == set(TASKS) and set(MEANINGS) == set(COLUMNS)


# --- on the worker ---

def test_a_survey_yields_to_others_between_forwards():
    worker, models = Worker(), pair()
    long, run = (
        worker.take(survey_session(models, ENDLESS, Rules(answers=10_000))),
        prepare(models, [LaneConfig("greedy")], Prompt("The red fox"), Limits(0, 8)),
    )
    other = worker.take(run)
    assert [frame["state"] for frame in other.frames() if frame][-1] == "done" and not long.over
    long.stop()
    assert [frame for frame in long.frames() if frame][-1]["state"] == "done"


def test_what_the_worker_serves_answers_as_the_survey_itself():
    run = Worker().take(survey_session(pair(), TWO, Rules()))
    served = [answer for frame in run.frames() if frame for answer in frame["events"]]
    alone = [*survey(pair(), TWO.entrants(), TWO.questions(Rules()), TWO.repeats, Limits(TWO.seed, TWO.length))]
    assert [(one.entrant, one.number, one.round, one.token_ids, one.forwards) for one in served] \
        == [(one.entrant, one.number, one.round, one.token_ids, one.forwards) for one in alone]


def test_a_survey_that_is_stopped_drops_the_answer_under_way():
    closed = []

    def endless():
        try:
            while True:
                yield None
        finally:
            closed.append(True)

    session = SurveySession(endless())
    assert session.advance() == [] and not session.finished
    assert session.stop() == [] and session.finished and closed == [True]


def test_seconds_exclude_the_turns_of_others(monkeypatch):
    ticks, others = count(), []
    monkeypatch.setattr("playground.bench.survey.survey.perf_counter", lambda: next(ticks) + 1000 * len(others))
    session, answers = survey_session(pair(), replace(TWO, lanes=[GREEDY], repeats=1), Rules()), []
    while not session.finished:
        answers += session.advance()
        others.append("a turn of a thousand seconds")
    assert 12 <= answers[0].event.seconds < 1000


def test_time_left_takes_the_turns_of_others_into_account(monkeypatch):
    now = iter([10.0, 14.0])
    monkeypatch.setattr("playground.ui.benchmark.survey_visit.monotonic", lambda: next(now))
    question, entrants = questions_in(OWN)[0], [Entrant("greedy", LaneConfig("greedy"))]
    visit_ = SurveyVisit(replace(TWO, repeats=4), entrants, [question])
    visit_.answers = [Answer("greedy", 0, question, round, 0, seconds=2.0) for round in (1, 2)]
    forecast = Forecast(visit_)
    forecast.add(visit_.answers)
    assert forecast.left == 2 * 2.0 * (4.0 / 2.0)


# --- what is shown of it ---

def test_marks_distinguish_right_from_wrong_from_failed_from_unknown_from_not_asked():
    bird, fox = questions_in(OWN)
    unknown = replace(bird, answer=None)
    answers = [Answer("a", 0, bird, 1, 0, score=1.0, seconds=1.0), Answer("a", 0, bird, 2, 0, score=0.0, seconds=1.0),
               Answer("b", 0, bird, 1, 0, failure="It broke."),
               Answer("a", 1, unknown, 1, 0, text="?", seconds=1.0), Answer("b", 2, fox, 1, 0, lacking="a passage")]
    asked = table_value([Entrant(name, LaneConfig("greedy")) for name in "ab"], [bird, unknown, fox], answers)["asked"]
    assert [one["marks"] for one in asked] == [[0.5, "failed"], ["written", None], [None, "unasked"]]


def test_a_strategy_that_was_not_asked_did_not_fail():
    bird, _ = questions_in(OWN)
    answers, entrants = (
        [Answer("a", 0, bird, 1, 0, lacking="a passage", reason="not asked")],
        [Entrant("a", LaneConfig("greedy"))],
    )
    [row] = table_value(entrants, [bird], answers)["sections"][0]["rows"]
    assert row["failure"] == "" and row["remark"] == "Not asked: the question does not provide a passage."
    html = answers_to(bird, 0, entrants, answers)
    assert "not asked" in html and "a passage" in html and "failed" not in html and "failure" not in html


def test_rounds_that_wrote_the_same_are_grouped():
    bird, _ = questions_in(OWN)
    answers = [
        Answer("a", 0, bird, number, 0, text=text, score=0.0) for number, text in enumerate(("<b>", "no", "<b>"), 1)
    ]
    html = answers_to(bird, 0, [Entrant("a", LaneConfig("greedy"))], answers)
    assert (
        "rounds 1, 3" in html
        and "round 2" in html
        and html.count("&lt;b&gt;") == 1
        and "<b>" not in html.replace("<b class", "")
    )
