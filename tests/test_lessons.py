"""Lessons: their files, and the panel in a real browser over the bundled models."""
from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Page, expect

from playground.errors import Refusal
from playground.request_limits import Rules
from playground.trace.lane_metrics import metrics
from playground.ui.components.settings import Settings
from playground.ui.play.lane_editor import check
from playground.ui.play.lessons import SHOWN, lessons, read_lesson, settings_of
from support.lesson_pages import STEPS, address, arrive, begun, browser, page  # noqa: F401

LESSON = "guessing-ahead"
SUBJECTS = {
    "entropy",
    "temperature",
    "repetition",
    "guessing-ahead",
    "guessing-a-tree",
    "two-models",
    "small-cache",
    "grammars",
    "same-text",
    "several-texts",
    "watermark",
    "less-work",
    "all-at-once",
    "a-head",
    "a-smaller-model",
    "thinking",
    "reading-a-mind",
}


# --- the files ---

def test_every_subject_has_a_lesson_of_a_few_steps_with_questions():
    assert set(lessons()) == SUBJECTS
    for lesson in lessons().values():
        assert 4 <= len(lesson.steps) <= 7 and lesson.title and lesson.about and 1 <= lesson.minutes <= 10
        assert sum(step.question is not None for step in lesson.steps) >= 3
        assert all(step.heading and (step.paragraphs or step.question) for step in lesson.steps)


@pytest.mark.parametrize("lesson, step", STEPS)
def test_every_step_sets_the_page_to_something_that_can_run(lesson, step):
    settings, asked = settings_of(lesson.name, step), lesson.steps[step].settings
    settings.check(Rules.for_visitors())
    assert [checked["problem"] for checked in check(settings.lanes)] == [""] * len(asked["lanes"])
    assert {name: getattr(settings, name) for name in asked if name != "lanes"} == {
        name: asked[name] for name in asked if name != "lanes"
    }
    assert [lane["strategy"] for lane in settings.lanes] == [lane["strategy"] for lane in asked["lanes"]]
    assert lesson.steps[step].lane <= len(settings.lanes)


@pytest.mark.parametrize("lesson", lessons().values(), ids=lambda lesson: lesson.name)
def test_a_prediction_is_about_a_run_that_no_earlier_step_has_shown(lesson):
    for i, step in enumerate(lesson.steps):
        shown = step.settings in [earlier.settings for earlier in lesson.steps[:i]]
        assert step.question is None or step.question.is_prediction is not shown


def test_a_step_that_does_not_exist_is_refused():
    with pytest.raises(Refusal, match="no step 1 of a lesson 'juggling'"):
        settings_of("juggling", 0)
    with pytest.raises(Refusal, match="no step 100"):
        settings_of(LESSON, 99)


HEAD = (
    'title: A lesson\nminutes: 3\nabout: Something.\nremember: One thing.\nprompt: Hello\n'
    'lanes: [{"strategy": "greedy"}]\n'
)
STEP = "\n## First\nshow: prompt\n\nSome words that\ngo on.\n\nMore words.\n"
ASKED = "\nquestion: How many?\nanswer: tokens(1)\n"
CHOICES = "+ few | below 3\n- many | otherwise\n"


def written(tmp_path, text: str):
    path = tmp_path / "07-mine.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_lesson_is_read_and_settings_hold_from_step_to_step(tmp_path):
    later = "\n## Second\nshow: lanes\nseed: 4\n\nWords.\n\n## Third\nshow: cache\n"
    lesson = read_lesson(written(tmp_path, f"{HEAD}{STEP}{ASKED}{CHOICES}because: So it is.\n{later}"))
    first, second, third = lesson.steps
    assert (lesson.name, first.paragraphs, second.question) == ("mine", ["Some words that go on.", "More words."], None)
    assert first.question.readings == [("tokens", [1])] and first.question.because == "So it is."
    assert first.question.choices == [("few", "below", 3.0), ("many", "otherwise", 0.0)]
    assert "seed" not in first.settings and second.settings["seed"] == third.settings["seed"] == 4


@pytest.mark.parametrize(
    "text, message",
    [
        ("A lesson\n", "line 1: 'key: value' is expected"),
        ("title: A lesson\ntitel: x\n", "line 2: titel is not one of"),
        (HEAD.replace("minutes: 3", "minutes: three") + STEP, "line 2: the value of minutes cannot be read"),
        (HEAD.replace("minutes: 3\n", "") + STEP, "line 1: minutes is missing"),
        (HEAD.replace("3", "true") + STEP, "line 2: true is not a value of minutes"),
        (HEAD, "line 1: the lesson has no step"),
        (HEAD + "mode: song\n" + STEP, "line 7: song is not a value of mode"),
        (HEAD + "\n## First\n\nWords.\n", "line 8: show is missing"),
        (HEAD + "\n## First\nshow: moon\n", "line 9: moon is not a value of show"),
        (HEAD + "\n## First\nshow: prompt\nlanes: [{\n", "line 10: the value of lanes cannot be read"),
        (HEAD + STEP + CHOICES, "line 14: 'key: value' is expected"),
        (HEAD + STEP + "\n" + CHOICES, "line 8: this step has an answer but no question"),
        (HEAD + STEP + ASKED, "line 8: a question has either choices or a line 'guess:'"),
        (HEAD.replace("remember: One thing.\n", "") + STEP, "line 1: remember is missing"),
        (HEAD + STEP + ASKED + "- few | below 3\n- many | otherwise\n", "line 8: mark one choice with +"),
        (HEAD + STEP + ASKED + "guess: a number\n", "line 8: mark one choice with +"),
        (HEAD + STEP + ASKED + "exercise: Look.\n" + CHOICES, "line 8: a step has either a question or an exercise"),
        (HEAD + STEP.replace("show: prompt", "show: tree\nat: the end"), "line 10: the end is not a value of at"),
        (HEAD + STEP + ASKED + "- few | under 3\n", "line 18: a choice is"),
        (
            HEAD + STEP + ASKED + "- many | otherwise\n- few | below 3\n- more | otherwise\n",
            "line 8: the limits of the choices must increase",
        ),
        (
            HEAD + STEP + ASKED.replace("tokens(1)", "tokens(2)") + CHOICES,
            "asks about a lane that this step does not have",
        ),
        (HEAD + STEP + ASKED.replace("tokens(1)", "tokens of lane 1") + CHOICES, "is neither a reading such as"),
    ],
)
def test_a_malformed_lesson_gets_a_sentence_with_its_file_and_line(tmp_path, text, message):
    with pytest.raises(Refusal) as refused:
        read_lesson(written(tmp_path, text))
    assert str(refused.value).startswith("07-mine.md, line ") and message in str(refused.value)


# --- a page over the bundled models, which keeps the sessions that were begun ---

def press(page: Page, text: str) -> None:
    """By keyboard: the tab key moves the focus there from inside the panel."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == text:
            return page.keyboard.press("Enter")
    raise AssertionError(f"no tab leads to {text!r}")


def test_every_part_that_a_lesson_points_at_is_on_the_page(page, address):
    arrive(page, address)
    named = {step.show for lesson in lessons().values() for step in lesson.steps}
    assert named <= set(SHOWN)
    for selector in SHOWN.values():
        expect(page.locator(selector).first).to_be_attached()


@pytest.mark.journey
def test_a_lesson_is_completed_by_keyboard_with_the_answer_of_the_trace(page, address, begun):
    arrive(page, address)
    steps = lessons()[LESSON].steps
    page.locator(".lessons-open").focus()
    page.keyboard.press("Enter")
    press(page, page.locator(".lesson-list button").nth(3).text_content())
    expect(page.locator(".lesson-panel h3")).to_be_focused()
    levels = page.evaluate("""[...document.querySelectorAll("h1, h2, h3, h4, h5, h6")]
        .filter((one) => one.checkVisibility())
        .map((one) => Number(one.getAttribute("aria-level") || one.tagName[1]))""")
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:])), levels
    expect(page.locator(".lesson-panel h3")).to_have_text(steps[0].heading)
    while page.evaluate("document.activeElement.type") != "radio":
        page.keyboard.press("Tab")
    expect(page.locator("#prompt textarea")).to_have_value(steps[0].settings["prompt"])  # it is known what is predicted
    expect(page.locator(".lane-card")).to_have_count(len(steps[0].settings["lanes"]))
    expect(page.locator("#live .lanes")).to_be_hidden()  # the results of another run are covered until the prediction
    assert page.locator("#live .live").evaluate("live => live.offsetHeight") <= 320, "its sentence stays in sight"
    page.keyboard.press("Space")
    press(page, "Set up and run")
    expect(page.locator(".lesson-said")).to_be_visible()
    expect(page.locator("#prompt textarea")).to_have_value(steps[0].settings["prompt"])
    forwards = [metrics(begun[-1].trace.lane(lane))["target_forwards"] for lane in (0, 1)]
    expect(page.locator(".lesson-said")).to_contain_text(
        f"{forwards[1]} forwards in lane 2 instead of {forwards[0]} in lane 1"
    )
    true = next(
        i
        for i, (_, kind, limit) in enumerate(steps[0].question.choices)
        if kind == "otherwise" or forwards[1] / forwards[0] < limit
    )
    expect(page.locator(".lesson-question label").nth(true)).to_have_class("is-true")
    expect(page.locator(".lesson-question label").nth(0).locator(".verdict")).to_contain_text("you")
    expect(page.locator("#live .lanes")).to_be_visible()
    for step in steps[1:]:
        press(page, "Next")
        expect(page.locator(".lesson-panel h3")).to_have_text(step.heading)
    assert json.loads(page.evaluate("localStorage['decoding-playground.lesson']")) == {
        "lesson": LESSON,
        "step": len(steps) - 1,
    }
    page.keyboard.press("Escape")
    expect(page.locator(".lesson-panel")).to_be_hidden()
    expect(page.locator(".lessons-open")).to_be_focused()
    expect(page.locator("#prompt textarea")).to_have_value(steps[-1].settings["prompt"])


def test_a_link_opens_a_lesson_and_an_unknown_one_is_answered_with_a_sentence(page, address):
    arrive(page, address, "?lesson=small-cache")
    expect(page.locator(".lesson-panel h3")).to_have_text(lessons()["small-cache"].steps[0].heading)
    arrive(page, address, "?lesson=juggling")
    expect(page.locator(".lesson-trouble")).to_contain_text("no lesson “juggling”")
    expect(page.locator(".lesson-list li")).to_have_count(len(lessons()))


def test_a_lesson_in_the_address_goes_before_what_the_last_visit_chose_and_a_reload_keeps_what_was_typed(page, address):
    first, prompt = lessons()[LESSON].steps[0], page.locator("#prompt textarea")
    arrive(page, address, f"?s={Settings(prompt='The red fox', length=12).to_code()}")
    expect(prompt).to_have_value("The red fox")
    arrive(page, address, f"?lesson={LESSON}")
    expect(prompt).to_have_value(first.settings["prompt"])
    prompt.fill("The green bird")
    page.keyboard.press("Tab")
    page.wait_for_function("playground.settingsNow().prompt === 'The green bird'")
    page.reload()
    expect(page.locator(".lesson-panel h3")).to_have_text(first.heading)
    page.wait_for_timeout(500)
    expect(prompt).to_have_value("The green bird")


def test_the_address_follows_the_lesson(page, address):
    arrive(page, address)
    page.click(".lessons-open")
    page.locator(".lesson-list button").nth(3).click()
    assert page.evaluate("new URLSearchParams(location.search).get('lesson')") == LESSON
    page.reload()
    expect(page.locator(".lesson-panel h3")).to_have_text(lessons()[LESSON].steps[0].heading)
    page.keyboard.press("Escape")
    assert "lesson" not in page.url


ONE_VIEW = "localStorage['decoding-playground.view'] = JSON.stringify({ pace: 'live', views: 'one' })"
EDGES = """() => ['.live .lanes', '.live .inspector', '.lesson-panel'].map((selector) => {
    const { left, right, top, bottom } = document.querySelector(selector).getBoundingClientRect();
    return { left, right, top, bottom };
})"""


def test_a_lesson_stands_beside_the_text_and_the_view_it_speaks_of(page, address):
    page.add_init_script(ONE_VIEW)
    arrive(page, address, f"?lesson={LESSON}")
    for step, name in ((2, "rounds"), (3, "tree")):
        page.get_by_role("button", name=f"Step {step}: ").click()
        if step == 2:
            page.get_by_text("Go on without a prediction").click()
        expect(page.locator(f".live .view-tab[data-view='{name}']")).to_have_attribute("aria-selected", "true")
    expect(page.locator(".live .panel-tree")).to_be_visible()
    for width in (1440, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        expect(page.locator(".live")).to_have_attribute("data-views", "one")
        text, shown, lesson = page.evaluate(EDGES)
        assert text["left"] + 380 < text["right"] <= shown["left"] and shown["right"] <= lesson["left"]
        assert max(text["bottom"], shown["bottom"]) <= 900 and lesson["top"] < text["bottom"]
    page.set_viewport_size({"width": 1440, "height": 900})


def test_only_the_first_choice_of_a_question_is_bounded_on_one_side():
    """ "Fewer than a quarter" and "fewer than three quarters" would both be true of a tenth."""
    below = re.compile(r"\b(fewer|less) than\b|\bup to\b")
    above = re.compile(r"\b(more than|or more)\b")
    for lesson in lessons().values():
        for question in filter(None, (step.question for step in lesson.steps)):
            loose = [text for text, *_ in question.choices if below.search(text) and not above.search(text)]
            assert loose in ([], [text for text, *_ in question.choices[:1]]), f"{lesson.name}: {question.text}"


def test_a_forward_is_explained_where_forwards_are_counted_first():
    first = lessons()[LESSON].steps[0].paragraphs[0]
    assert first.startswith("A **forward** is one pass of a model")


def test_a_lesson_resumes_where_it_was_left(page, address):
    arrive(page, address, "?lesson=entropy")
    page.get_by_role("button", name="Step 3: ").click()
    arrive(page, address)
    page.click(".lessons-open")
    expect(page.locator(".lesson-list button").first).to_contain_text("continue at step 3")
    page.locator(".lesson-list button").first.click()
    expect(page.locator(".lesson-panel h3")).to_have_text(lessons()["entropy"].steps[2].heading)


def test_a_lesson_that_was_gone_through_asks_anew(page, address):
    """To another class it shows neither the prediction nor the answer of the one before."""
    steps = lessons()["same-text"].steps
    arrive(page, address, "?lesson=same-text")
    page.locator(".lesson-question input").first.check()
    press(page, "Set up and run")
    expect(page.locator(".lesson-said")).to_be_visible()
    page.get_by_role("button", name=f"Step {len(steps)}: ").click()
    page.locator(".lesson-way").get_by_role("button", name="All lessons").click()
    page.locator(".lesson-list button", has_text=lessons()["same-text"].title).click()
    expect(page.locator(".lesson-panel h3")).to_have_text(steps[0].heading)
    expect(page.get_by_text("Go on without a prediction")).to_be_visible()
    expect(page.locator(".lesson-question input:checked")).to_have_count(0)
    expect(page.locator(".lesson-said")).to_have_count(0)


def test_other_runs_answer_no_question_of_the_lesson(page, address):
    arrive(page, address, "?lesson=same-text")
    page.get_by_text("Go on without a prediction").click()
    expect(page.get_by_text("Run again")).to_be_visible()
    page.fill("#prompt textarea", "What is 1 + 1?")
    page.click("#run")
    expect(page.get_by_text("Set up and run")).to_be_visible()
    expect(page.get_by_text("Run again")).to_have_count(0)


@pytest.mark.parametrize("width", [1440, 390])
def test_the_panel_does_not_cover_its_target(page, address, width):
    page.set_viewport_size({"width": width, "height": 900})
    arrive(page, address, f"?lesson={LESSON}")
    page.get_by_text("Go on without a prediction").click()
    expect(page.get_by_text("Run again")).to_be_visible()
    page.get_by_role("button", name="Step 2: ").click()
    page.get_by_text("Go on without a prediction").click()
    expect(page.get_by_text("Run again")).to_be_visible()
    rounds = page.locator(SHOWN["rounds"])
    expect(rounds).to_have_css("outline-style", "solid")
    page.wait_for_function(
        """([part, wide]) => {
        const boxOf = (found) => document.querySelector(found).getBoundingClientRect();
        const [box, panel] = [part, ".lesson-panel"].map(boxOf);
        return box.top >= 0 && (wide ? box.right <= panel.left : box.top < panel.top - 100);
    }""",
        arg=[SHOWN["rounds"], width > 1100],
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
