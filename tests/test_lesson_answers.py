"""What lessons read off a run is what its events say, and their answers are true of their runs."""
from __future__ import annotations

import json
from dataclasses import asdict
from fractions import Fraction

import pytest
from playwright.sync_api import Page

import playground
from playground.decoding.visitor_memory import Memory
from playground.events import Done, Step
from playground.lane_fields import LaneConfig
from playground.player import live_view_assets as view
from playground.player.frames import recording
from playground.run_request import DEFAULT
from playground.trace import Trace
from playground.trace.lane_metrics import diff, metrics
from playground.trace.transcript import sequences
from playground.ui.play.lessons import lessons, settings_of
from playground.ui.server.gpu_work import prepare_run
from support.lesson_pages import begun, browser, models, page  # noqa: F401
from support.page_scripts import defining


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
    used = playground.with_weights(used, [LaneConfig(**lane) for lane in settings.lanes])
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
    sums = [text.split()[-1] for step in (4, 5, 6) for text in texts("reading-a-mind", step)]
    assert [number == "29" for number in sums] == [True, True, True, False, True, True]  # only digit features matter
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
