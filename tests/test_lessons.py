"""Lessons: their files, what they read off a run, the panel in a real browser over the bundled models; and the
projector mode.
"""
from __future__ import annotations

import json
import re
from dataclasses import asdict
from fractions import Fraction

import pytest
from chromium import chromium, new_context
from playwright.sync_api import BrowserContext, Page, expect

import playground
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.events import Done, Step
from playground.player import live_view_assets as view
from playground.player.frames import recording
from playground.request_limits import Rules
from playground.run_request import DEFAULT
from playground.trace import Trace
from playground.trace.lane_metrics import diff, metrics
from playground.trace.transcript import sequences
from playground.ui.components.theme import theme_options
from playground.ui.play.lane_editor import check
from playground.ui.play.lessons import SHOWN, lessons, read_lesson, settings_of
from playground.ui.server.gpu_work import prepare_run
from playground.ui.server.pages import build
from playground.ui.server.site import Site
from support.page_scripts import defining

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
    "thinking",
}
STEPS = [
    pytest.param(lesson, i, id=f"{lesson.name}-{i + 1}")
    for lesson in lessons().values()
    for i in range(len(lesson.steps))
]


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

@pytest.fixture(scope="module")
def begun():
    return []


@pytest.fixture(scope="module")
def address(begun):
    def prepare(models, settings, memory):
        begun.append(prepare_run(models, settings, memory))
        return begun[-1]

    demo = build(Site(prepare=prepare))
    yield demo.launch(prevent_thread_lock=True, quiet=True, run_history=False, **theme_options())[1]
    demo.close()


@pytest.fixture(scope="module")
def browser():
    """One browser for all visitors, so that the page's own files are fetched once."""
    with chromium() as opened:
        yield new_context(opened, viewport={"width": 1440, "height": 900}, reduced_motion="reduce")


@pytest.fixture
def page(browser: BrowserContext):
    """A first-time visitor who prefers reduced motion; script errors fail the test."""
    page, wrong = browser.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    if page.url.startswith("http"):
        page.evaluate("localStorage.clear()")
    page.close()
    assert not wrong


def arrive(page: Page, address: str, query: str = "") -> None:
    page.goto(address + query)
    expect(page.locator("#live [data-recorded='true'] .tokens > *").nth(2)).to_be_attached()


def press(page: Page, text: str) -> None:
    """By keyboard: the tab key moves the focus there from inside the panel."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == text:
            return page.keyboard.press("Enter")
    raise AssertionError(f"no tab leads to {text!r}")


def reading_scripts() -> str:
    return defining("run/trace.js", "run/readings.js", constants=view.constants())


def read_off(page: Page, trace: Trace, asked: list) -> list[float | None]:
    """What readings.js says of a trace."""
    return page.evaluate(
        """([code, frame, asked]) => new Function("frame", "asked", `${code}
        const trace = new Trace();
        trace.take(JSON.parse(frame));
        const readings = new Readings(trace);
        return asked.map(([name, lanes]) => readings.read(name, lanes).value);`)(frame, asked)""",
        [reading_scripts(), frame_of(trace), asked],
    )


def frame_of(trace: Trace) -> str:
    return json.dumps(
        recording([asdict(header) for header in trace.headers], [stamped.to_json() for stamped in trace.events])
    )


def test_every_reading_named_by_a_lesson_exists_and_accepts_its_lanes(page):
    known = page.evaluate(
        "(code) => new Function(`${code}; return Object.entries(READINGS).map(([name, { of }]) => [name,"
        " of.length])`)()",
        reading_scripts(),
    )
    asked = [
        reading
        for lesson in lessons().values()
        for step in lesson.steps
        if step.question
        for reading in step.question.readings
    ]
    assert asked and {(name, len(lanes)) for name, lanes in asked} <= {(name, lanes) for name, lanes in known}


def test_readings_of_a_recorded_run_equal_its_events(page):
    trace = Trace.load(view.ASSETS / "traces/first_view.jsonl")
    lanes = [trace.lane(header.lane) for header in trace.headers]
    speculative = next(i for i, header in enumerate(trace.headers) if header.strategy == "speculative")
    names = [
        "tokens",
        "target_forwards",
        "draft_forwards",
        "tokens_per_target_forward",
        "mean_accepted",
        "mean_entropy",
        "kv_live_peak",
        "wasted_tokens",
    ]
    assert read_off(page, trace, [(name, [speculative + 1]) for name in names]) == pytest.approx(
        [metrics(lanes[speculative])[name] for name in names]
    )
    asked = {"unsure_share": lambda step: step.entropy > 1, "sure_share": lambda step: step.entropy < 0.1,
             "off_top_share": lambda step: step.top[0].id != step.chosen}
    for i, lane in enumerate(lanes):
        steps = [stamped.event for stamped in lane.events if isinstance(stamped.event, Step)]
        shares = [sum(map(test, steps)) / len(steps) for test in asked.values()]
        assert read_off(page, trace, [(name, [i + 1]) for name in asked]) == pytest.approx(shares)
        parting = diff(lanes[0], lane)
        assert read_off(page, trace, [("first_difference", [1, i + 1])]) == [parting and parting.index + 1]


@pytest.fixture(scope="module")
def models():
    return playground.load()


@pytest.mark.slow
@pytest.mark.parametrize("lesson", lessons().values(), ids=lambda lesson: lesson.name)
def test_every_answer_of_a_lesson_is_what_its_run_shows_with_a_margin(page, models, lesson):
    runs = {}
    for i, step in enumerate(lesson.steps):
        if step.question is None:
            continue
        key = json.dumps(step.settings)
        runs[key] = runs.get(key) or written_out(models, settings_of(lesson.name, i))
        value = answer_of(step.question, read_off(page, runs[key], step.question.readings))
        if step.question.guess:
            assert value == step.question.expected, step.heading
        else:
            nearly = [value] if value is None else [0.95 * value, value, 1.05 * value]
            assert [holding(step.question, one) for one in nearly] == [step.question.expected] * len(nearly), (
                step.heading,
                value,
            )


def written_out(models, settings) -> Trace:
    used = models if settings.model == DEFAULT else playground.load(settings.model)
    session = prepare_run(used, settings, Memory())
    for _ in session:
        pass
    return session.trace


def answer_of(question, values: list[float | None]) -> float | None:
    if question.sign and None in values:
        return None
    if question.sign == "-":
        return values[0] - values[1]
    return values[0] / values[1] if question.sign else values[0]


def holding(question, value: float | None) -> int:
    """Index of the choice that holds for a value."""
    return next(
        i
        for i, (_, kind, limit) in enumerate(question.choices)
        if (kind == "none") == (value is None)
        and (kind in ("none", "otherwise") or (value < limit if kind == "below" else value <= limit))
    )


@pytest.mark.slow
def test_what_the_lessons_say_beside_their_answers_is_true_of_their_runs(models):
    def texts(name: str, step: int) -> list[str]:
        trace = written_out(models, settings_of(name, step - 1))
        return [sequences(trace.lane(lane).events)[0].text for lane in range(len(trace.headers))]

    (loop,) = [written_out(models, settings_of("repetition", 0))]
    steps = sequences(loop.lane(0).events)[0].steps
    entropies = [steps[place].entropy for place in sorted(steps)]
    assert sum(entropies[-24:]) < 0.25 * sum(entropies[:24])  # "the entropy falls while the phrase repeats"
    assert [Fraction(text.split()[-1]) for text in texts("two-models", 4)] == [9, 7]  # (25 - 7) / 2, and a wrong sum
    assert texts("small-cache", 4) == [" 8328", " 83", " 8328"]  # "lane 2 loses the key after its first digits"
    assert texts("grammars", 1)[1].strip() == "27"  # "valid, and wrong"
    sums = [text.split()[-1] for step in (2, 4, 5) for text in texts("less-work", step)[1:]]
    assert sums == ["29", "25", "29"]  # half of the channels, without four blocks, and FFNs skipped token by token
    assert [text.strip() for text in texts("several-texts", 4)[1:]] == ["4", "5"]  # five things are listed
    # "a number of the question", "the result of the first step", "nothing", and "sure of a wrong answer"
    answers = [[int(text.split("####")[1]) for text in texts("thinking", step)] for step in (2, 3, 4, 5)]
    assert answers == [[39, 6], [39, 42], [16, 16], [16, 32]]


def test_the_tree_lesson_goes_to_a_fork_where_a_sibling_was_accepted(page, models):
    """p, q, the draw and the residual of the fork are those of the trace, and each verdict follows from them."""
    lesson = lessons()["guessing-a-tree"]
    i = next(i for i, step in enumerate(lesson.steps) if step.at == "side_branch")
    trace = written_out(models, settings_of(lesson.name, i))
    said, event = page.evaluate(
        """([code, frame]) => new Function("frame", `${code}
        const trace = new Trace();
        trace.take(JSON.parse(frame));
        const readings = new Readings(trace);
        return [readings.read("siblings_rejected", [2]).said, readings.place("side_branch", 2)];`)(frame)""",
        [reading_scripts(), frame_of(trace)],
    )
    before = [stamped.event for stamped in trace.lane(1).events[:event + 1]]
    draft, verdict = ([e for e in before if e.kind == kind][-1] for kind in ("draft", "verdict"))
    side = next(node for node in verdict.kept if draft.parents.index(draft.parents[node]) != node)
    tests = [test for test in verdict.tests if draft.parents[test.node] == draft.parents[side]]
    assert len(tests) > 1 and [test.kept for test in tests] == [False] * (len(tests) - 1) + [True]
    for test in tests:
        assert test.kept == (test.draw < test.p / test.q)
        assert f"{'r' if test.residual else 'p'} = {test.p:.3f}" in said and f"u = {test.draw:.3f}" in said


def test_a_run_that_was_stopped_gives_no_reading(page):
    whole = Trace.load(view.ASSETS / "traces/first_view.jsonl")
    stopped = Trace(
        whole.headers,
        [
            stamped._replace(event=Done("stopped")) if isinstance(stamped.event, Done) else stamped
            for stamped in whole.events
        ],
    )
    assert read_off(page, stopped, [("tokens", [1]), ("first_difference", [1, 2])]) == [None, None]


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


# --- the projector ---

CONTROLS = (
    "#prompt", "#run", ".lessons-open", "#gallery", ".settings-open", ".lane-card .edit >> nth=0", ".add-lane",
    ".live .player", ".live .lanes", ".live .key", ".live .views",
)


@pytest.mark.parametrize("place, heading", [("", ".masthead h1"), ("library", "#library h2"), ("game", ".game-lead h2"),
                                            ("benchmark", ".masthead h1")])
def test_projector_mode_enlarges_every_page_by_half_without_overflow(page, address, place, heading):
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(address + place)
    inked = f"""() => {{
        const words = document.createRange();
        words.selectNodeContents(document.querySelector("{heading}"));
        return words.getBoundingClientRect().width;
    }}"""
    page.locator(heading).wait_for()
    before = page.evaluate(inked)
    page.keyboard.press("p")
    assert page.evaluate(inked) == pytest.approx(1.5 * before, rel=0.02)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("playground.switchProjector()")


def test_projector_mode_hides_nothing_and_covers_nothing(page, address):
    page.set_viewport_size({"width": 1440, "height": 900})
    arrive(page, address)
    page.keyboard.press("p")
    for control in CONTROLS:
        expect(page.locator(control)).to_be_visible()
    for part in (".live .lane[data-lane='0'] .text", ".live .player", "#run"):
        expect(page.locator(part)).to_be_in_viewport()
    page.click(".lessons-open")
    page.locator(".lesson-list button").first.click()
    expect(page.locator(".lesson-panel h3")).to_be_visible()
    page.locator("#run").click(trial=True)  # nothing lies over it
    page.keyboard.press("Escape")
    page.evaluate("playground.switchProjector()")


def test_projector_mode_is_remembered_and_its_key_is_for_no_field(page, address):
    arrive(page, address)
    page.locator("#prompt textarea").press("p")
    expect(page.locator(".to-projector")).to_have_attribute("aria-pressed", "false")
    page.click(".to-projector")
    arrive(page, address)
    expect(page.locator(".to-projector")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("p")
    expect(page.locator(".to-projector")).to_have_attribute("aria-pressed", "false")
    page.keyboard.press("?")
    expect(page.locator("dialog.keys")).to_contain_text("projector")
