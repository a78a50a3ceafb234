"""Limits of requests: attacks on the public page over HTTP, and on everything that reads input of a
browser or a program.
"""
from __future__ import annotations

import json
from time import thread_time
from types import SimpleNamespace

import gradio as gr
import pytest

from playground.bench.survey.survey import Answer
from playground.bench.survey.survey_export import as_csv
from playground.errors import Refusal
from playground.events import Failed
from playground.questions.questions import Question
from playground.questions.user_questions import questions_in
from playground.request_limits import MAX_SEED, Rules
from playground.ui.benchmark.survey_handlers import SurveyHandlers
from playground.ui.benchmark.survey_run import SurveySettings
from playground.ui.components.event_fields import number, text, whole_number
from playground.ui.components.settings import Settings
from playground.ui.game import typed_words
from playground.ui.play import lane_editor as editor
from playground.ui.play import lessons
from playground.ui.play.gallery import picked
from playground.ui.play.live_handlers import LiveHandlers
from playground.ui.play.page_events import Acts
from playground.ui.play.playground_page import Page
from playground.ui.play.run_handlers import RunHandlers
from playground.ui.play.settings_handlers import SettingsHandlers
from playground.ui.play.visit import Visit
from playground.ui.server.site import Site
from support.limited_pages import MODELS, ROOT, STRANGERS, public  # noqa: F401

GREEDY = {"strategy": "greedy"}


# --- what settings, lanes and events may hold ---

LONE = "half \ud800 a letter"
MALFORMED = [
    ({"prompt": "x" * 4001}, "more than 4,000"),
    ({"prompt": LONE}, "surrogate"),
    ({"prompt": "a\0b"}, "NUL"),
    ({"system": LONE}, "surrogate"),
    ({"context": "x" * 5000}, "more than 4,000"),
    ({"tools": "x" * 5000, "mode": "chat"}, "at most 4,000"),
    ({"tools": '[{"name": "f"}]' + " " * 3990, "mode": "chat"}, "at most 4,000"),
    ({"tools": '[{"name": "\\ud800"}]', "mode": "chat"}, "surrogate"),
    ({"tools": "[" * 3000, "mode": "chat"}, "nested too deeply"),
    ({"before": [["x" * 5000, "y"]], "mode": "chat"}, "more than 4,000"),
    ({"before": [[LONE, "y"]], "mode": "chat"}, "surrogate"),
    ({"stop": "\n".join("abcdefghijklmnopq")}, "17 stop strings"),
    ({"stop": "x" * 201}, "201 characters"),
    ({"stop": "x" * 10_000}, "stop strings"),
    ({"model": "m" * 201}, "choice of model"),
    ({"draft": LONE}, "choice of draft"),
    ({"seed": 10**5000}, "more than 60 digits"),
    ({"seed": MAX_SEED + 1}, "seed"),
    ({"seed": float("nan")}, "whole number"),
    ({"length": 10**400}, "number of tokens"),
    ({"length": True}, "whole number"),
    ({"prompt": ["a"] * 9}, "empty"),
    ({"lanes": [GREEDY, "greedy"]}, "Lane 2 is malformed"),
    ({"lanes": [{"strategy": "g" * 201}]}, "201 characters"),
    ({"lanes": [GREEDY | {"forced": [1] * 400_000}]}, "begins with 400,000 forced tokens"),
    ({"lanes": [GREEDY | {"forced": [-1]}]}, "token ids"),
    ({"lanes": [GREEDY | {"forced": [2**31]}]}, "token ids"),
    ({"lanes": [GREEDY | {"forced": "abc"}]}, "must be a list"),
    ({"lanes": [GREEDY | {"extras": [["top_p", {}]] * 25}]}, "25 extras"),
    ({"lanes": [GREEDY | {"extras": [["top_p"]]}]}, "malformed"),
    ({"lanes": [GREEDY | {"seed": -1}]}, "seed of lane 1"),
    ({"lanes": [GREEDY | {"knobs": {str(number): 1 for number in range(49)}}]}, "49 knobs"),
    ({"lanes": [GREEDY | {"knobs": {"k" * 201: 1}}]}, "name of a knob"),
    ({"lanes": [GREEDY | {"knobs": {"x": float("inf")}}]}, "between -1e18"),
    ({"lanes": [GREEDY | {"knobs": {"x": 10**10_000}}]}, "between -1e18"),
    ({"lanes": [GREEDY | {"knobs": {"x": LONE}}]}, "surrogate"),
    ({"lanes": [{"strategy": "gencls_ppl", "knobs": {"labels": "good|bad|" + "x" * 300_000}}]}, "300,009 characters"),
    ({"lanes": [{"strategy": "caad", "knobs": {"pairs": "a => b\n" * 40_000}}]}, "280,000 characters"),
    ({"lanes": [GREEDY | {"extras": [["choice", {"options": "x" * 9000}]] * 5}]}, "knobs of all lanes have 45,000"),
]


@pytest.mark.parametrize("change, says", MALFORMED, ids=range(len(MALFORMED)))
def test_requests_beyond_public_limits_are_refused_in_a_short_sentence(change, says):
    with pytest.raises(Refusal) as refused:
        Settings(**({"prompt": "Hello"} | change)).check(STRANGERS)
    reply = str(refused.value)
    assert says in reply and len(reply) < 400 and reply.encode()


def test_a_local_page_has_higher_limits_than_a_public_one():
    longer = Settings("Hello", lanes=[{"strategy": "greedy", "extras": [["choice", {"options": "x" * 90_000}]]}])
    longer.check(Rules())
    with pytest.raises(Refusal, match="90,000 characters"):
        longer.check(STRANGERS)


@pytest.mark.parametrize(
    "values",
    [
        {"count": 10**4000},
        {"repeats": 0},
        {"tasks": ["nonsense"]},
        {"tasks": [{}]},
        {"own": "x" * 400_001},
        {"own": LONE},
        {"own": ["a"], "tasks": []},
        {"lanes": [GREEDY] * 400},
    ],
)
def test_a_survey_is_bounded_as_a_run_is(values):
    with pytest.raises(Refusal) as refused:
        SurveySettings(**({"lanes": [GREEDY]} | values)).check(STRANGERS)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a\\u0000b"}',
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "context": "%s"}' % ("x" * 20_001),
        "[" * 100_000,
        '{"prompt": "a", "answer": %s}' % ("9" * 5000),
        '{"prompt": "a", "%s": 1}' % ("k" * 100_000),
    ],
)
def test_a_question_of_ones_own_is_refused_with_its_line(line):
    with pytest.raises(Refusal, match="Line 1") as refused:
        questions_in(line)
    assert len(str(refused.value)) < 400


def test_links_with_hostile_contents_open_no_page_that_breaks():
    import base64
    many = json.dumps({"lanes": [{}] * 9000})
    for raw in (
        '{"prompt": "\\ud800", "lanes": [{"strategy": "greedy"}]}',
        f'{{"seed": {"9" * 5000}}}',
        "[" * 40_000,
        many,
    ):
        settings = Settings.from_code(base64.urlsafe_b64encode(raw.encode()).decode())
        if settings is not None:
            with pytest.raises(Refusal):
                settings.check(STRANGERS)


@pytest.fixture(scope="module")
def acts():
    """Handlers of a page without a model, and a visit whose run has one lane."""
    site = Site(rules=STRANGERS, load=None)
    with gr.Blocks():
        page = Page(site, gr.Row())
    run = SimpleNamespace(
        headers=[{"model": "m", "prompt_ids": [1]}],
        name="r",
        over=True,
        number=0,
        events=[],
        state="done",
        pace=lambda beat: None,
        stop=lambda lane=None: None,
        trace=SimpleNamespace(lane=lambda lane: SimpleNamespace(events=[])),
    )
    handlers = Acts(RunHandlers(site, page), LiveHandlers(site, page), SettingsHandlers(site, page))
    return handlers, Visit(Settings("Hello"), run=run)


HOSTILE = [
    {},
    None,
    [],
    {"lane": "x"},
    {"lane": -1},
    {"lane": 0},
    {"lane": 0, "sequence": 0, "position": 1e99, "token": 1},
    {"lane": 0, "sequence": "0", "position": 1, "token": 1},
    {"lane": float("nan")},
    {"lane": 0, "sequence": 0, "position": 0, "token": 10**50},
    {"lane": 0, "sequence": 0, "position": 0, "words": "w" * 10_000_000},
    {"lane": 0, "sequence": 0, "position": 0, "words": {"a": 1}},
    {"beat": "x"},
    {"beat": float("nan")},
    {"beat": -1e308},
    {"lane": [0]},
    {"lane": True},
    {"run": "gone", "lane": 0, "sequence": 0, "position": 0, "token": 1},
    {"run": ["r"], "lane": 0},
    {"run": "r", "lane": 0, "sequence": 0, "position": 0, "token": 1, "instead_of": 7},
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_a_malformed_event_is_answered_or_dropped(acts, data):
    act, visit = acts
    event = gr.EventData(None, data)
    for handler in (act.live.look, act.live.stop_lane, act.live.pace, act.live.missed):
        handler(visit, event)
    act.live.heard(event)
    said = [
        value
        for change in act.runs.fork(visit, event)
        if isinstance(change, dict)
        for value in change.values()
        if isinstance(value, str)
    ]
    assert all(len(sentence) < 400 for sentence in said)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"part": "questions", "index": -1},
        {"part": "questions", "index": 10**6},
        {"part": 3, "index": 0},
        {"part": "examples", "index": "x"},
        {"part": "examples", "index": float("nan")},
    ],
)
def test_an_entry_that_the_gallery_does_not_have_is_a_sentence(acts, data):
    changes = acts[0].settings.pick("default", "default", gr.EventData(None, data))
    assert any(value.endswith(".</span>") for value in changes.values() if isinstance(value, str))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"lesson": "x" * 10**6, "step": 0},
        {"lesson": "none", "step": 0},
        {"lesson": 3, "step": 0},
        {"step": 0},
        {"lesson": "none", "step": 1e300},
    ],
)
def test_a_lesson_that_does_not_exist_is_a_sentence(acts, data):
    with pytest.raises(gr.Error) as refused:
        acts[0].settings.set_up("default", "default", gr.EventData(None, data))
    assert len(str(refused.value)) < 400
    with pytest.raises(Refusal):
        lessons.settings_of("x" * 10**6, 0)


def test_fields_of_events_are_read_within_bounds():
    event = SimpleNamespace(a=3.0, b=2.5, c="abc", d=-1, e=True)
    assert (whole_number(event, "a"), number(event, "b", 0, 3), text(event, "c", 3)) == (3, 2.5, "abc")
    for read in (
        lambda: whole_number(event, "b"),
        lambda: whole_number(event, "d"),
        lambda: whole_number(event, "e"),
        lambda: whole_number(event, "none"),
        lambda: number(event, "b", 0, 2),
        lambda: number(event, "c", 0, 2),
        lambda: text(event, "c", 2),
        lambda: text(event, "a", 2),
    ):
        with pytest.raises(Refusal):
            read()
    with pytest.raises(Refusal, match="no such entry"):
        picked("examples", 10_000)


def test_the_lane_editor_explains_what_it_cannot_read():
    assert "1 is malformed" in editor.check(["x"])[0]["problem"]
    assert "characters" in editor.check([{"strategy": "gencls_ppl", "knobs": {"labels": "x" * 200_000}}])[0]["problem"]
    assert editor.check([GREEDY])[0]["problem"] == "" and editor.check({"a": 1}) == []
    assert len(editor.check([GREEDY] * 100_000)) <= 8


def test_a_word_in_the_game_is_bounded():
    odds = typed_words.probability_lookup(SimpleNamespace())
    for asked in (
        {"ids": [1], "word": LONE},
        {"ids": [1], "word": " " * 10**7},
        {"ids": [1] * 300_000, "word": "a"},
        {"ids": [2**40], "word": "a"},
        {"ids": [-1], "word": "a"},
        {"ids": [1.5], "word": "a"},
        None,
        [],
    ):
        assert len(odds(asked)["refused"]) < 200


def test_a_survey_event_that_is_malformed_shows_and_saves_nothing():
    acts, visit = SurveyHandlers(None, None), SimpleNamespace(questions=[], answers=[], entrants=[], facts={}, beside=0)
    for data in (None, {}, {"number": "x"}, {"number": 1e99}, {"number": -1}, {"number": 0}):
        assert acts.show(visit, gr.EventData(None, data)) == ""
    for data in ({}, {"form": "../../etc"}, {"form": ["csv"]}):
        assert "saved" not in acts.save(visit, gr.EventData(None, data))


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_the_benchmark_csv_starts_no_formula(start):
    import csv
    import io
    hostile = f"{start}cmd|' /C calc'!A0"
    answer = Answer(hostile, 0, Question("own", hostile, hostile, context=hostile), 0, 0, text=hostile, failure=hostile)
    row = next(csv.DictReader(io.StringIO(as_csv([answer]), newline="")))
    assert [row[name] for name in ("entrant", "prompt", "context", "expected", "text", "failure")] == [
        f"'{hostile}"
    ] * 6
    assert row["round"] == "0"


# --- the worker's steps, over requests that keep every limit ---

WORDS = " ".join(f"red{number}" for number in range(2000))[:9900]
HEAVY = {
    "gencls_ppl": {"strategy": "gencls_ppl", "knobs": {"labels": "|".join(f"ab{number}" for number in range(1500))}},
    "caad": {"strategy": "greedy", "extras": [["caad", {"pairs": "a => b c d\n" * 800}]]},
    "caad, one answer": {"strategy": "greedy", "extras": [["caad", {"pairs": f"a => {WORDS}"}]]},
    "exact_extract": {"strategy": "exact_extract", "knobs": {"passage": WORDS[:900], "prune": False, "longest": 40}},
    "exact_extract, long": {"strategy": "exact_extract", "knobs": {"passage": WORDS}},
    "static": {
        "strategy": "static",
        "knobs": {"items": "|".join(f"ab{number}" for number in range(1000, 2400)), "beams": 64},
    },
    "superposed": {"strategy": "superposed", "knobs": {"corpus": WORDS, "drafts": 10, "kept": 60}},
    "knn_lm": {"strategy": "greedy", "extras": [["knn_lm", {"text": WORDS}]]},
    "rasd": {"strategy": "speculative", "extras": [["rasd", {"corpus": WORDS}]]},
    "rest": {"strategy": "speculative", "extras": [["rest", {}]]},
    "rest, one letter": {"strategy": "speculative", "extras": [["rest", {"corpus": "e" * 9900, "shortest": 1}]]},
    "mbr": {"strategy": "mbr"},
    "dry": {"strategy": "greedy", "extras": [["dry", {"breakers": WORDS}]]},
}
TOO_MUCH = {
    "gencls_ppl": "the maximum is 512",
    "exact_extract": "8,192 spans",
    "caad": "the maximum is 64",
    "caad, one answer": "the maximum for all of them is 512",
    "exact_extract, long": "the maximum is 1,024",
}


@pytest.mark.slow
@pytest.mark.parametrize("heavy", HEAVY)
def test_no_request_within_the_limits_holds_the_worker_for_two_seconds(public, heavy):
    import playground
    from playground.decoding.visitor_memory import Memory
    from playground.ui.server.gpu_work import prepare_run
    settings = Settings("The red fox", length=60, lanes=[{"knobs": {}, "extras": [], "forced": []} | HEAVY[heavy]])
    settings.check(STRANGERS)
    session = prepare_run(playground.load(MODELS["target"], MODELS["draft"]), settings, Memory())
    reply = []
    for _ in range(150):
        start = thread_time()
        reply += session.advance()
        assert thread_time() - start < 2
    messages = [stamped.event.message for stamped in reply if isinstance(stamped.event, Failed)]
    assert [TOO_MUCH[heavy] in message for message in messages] == ([True] if heavy in TOO_MUCH else [])


def test_unknown_token_ids_end_one_lane_with_a_sentence(public):
    import playground
    from playground.contract.lane_config import LaneConfig

    results = playground.compare(
        [LaneConfig("greedy", forced=[200_000]), LaneConfig("greedy", forced=[1] * 9), LaneConfig("greedy")],
        "The red fox",
        models=playground.load(MODELS["target"]),
        max_new_tokens=8,
    )
    assert "has 319 tokens" in results[0].message and "9 fixed tokens" in results[1].message and not results[2].message
