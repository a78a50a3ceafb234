"""Questions with known answers: scoring, lookup, and the verdict in a lane."""
from __future__ import annotations

import json
import random
from dataclasses import replace

import jsonschema
import pytest
from pairs import pair
from tables import TableModel

from playground.cli import terminal_view as screen
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.prompt import Prompt
from playground.decoding.session import prepare
from playground.errors import Refusal
from playground.events import Commit, Done, Judged
from playground.questions import questions
from playground.questions.questions import Question, ask, from_item, gallery, judge, judging, known, verdict
from playground.questions.world import TASKS, arithmetic, context_qa, facts, programs
from playground.request_limits import Rules
from playground.trace import Trace, check
from playground.trace.result import Result
from playground.ui.components.settings import Settings
from playground.ui.play.gallery import TASKS as TITLES
from playground.ui.play.gallery import picked, question_note
from playground.ui.server.model_loader import ModelRequest
from playground.ui.server.site import Site

EACH = pytest.mark.parametrize(
    "question", gallery(), ids=[f"{question.task} {i}" for i, question in enumerate(gallery())]
)
ROMAN = Question("facts", "Who rules Hifak?", "abc")
STORY = "Nora met a cat. " + " ".join(f"Then Nora counted to {n}." for n in range(10)) + " The end."


# --- the gallery ---

def test_every_task_has_five_questions_or_more_over_its_grades():
    for task, module in TASKS.items():
        grades = [question.grade for question in gallery() if question.task == task]
        assert len(grades) >= 5 and len(set(grades)) >= min(4, len(module.GRADES)), task
        assert task in TITLES


def test_questions_and_their_descriptions_are_distinct():
    asked = [(question.prompt, question.before, question.context) for question in gallery()]
    assert len(set(asked)) == len({question.look for question in gallery()}) == len(gallery())


@EACH
def test_a_question_says_in_a_sentence_what_to_look_at(question):
    assert 40 <= len(question.look) <= 220 and question.look[0].isupper() and question.look[-1] in ".?"


@EACH
def test_the_known_answer_is_right_and_another_is_not(question):
    if question.task == "stories":
        assert (
            judge(question, STORY.replace("Nora", question.meta["hero"]))
            == 1
            > judge(question, STORY.replace("Nora", "nobody"))
        )
        return
    assert judge(question, f" {question.answer}\n") == 1
    assert judge(question, "") < 1 and judge(question, corrupted(question.answer)) < 1


def corrupted(answer: str) -> str:
    return answer[:-1] + str((int(answer[-1]) + 1) % 10) if answer[-1].isdigit() else answer[:len(answer) // 2]


@EACH
def test_the_lanes_of_a_question_can_run_on_a_public_page(question):
    settings = Settings.read(picked("questions", gallery().index(question)))
    settings.check(Rules.for_visitors())
    assert settings.known() == question
    assert [config.strategy for config in settings.configs()] == [
        lane["strategy"] for lane in question.settings["lanes"]
    ]
    for config in settings.configs():
        assemble(config)


def test_answers_about_passages_and_keys_occur_in_the_prompt():
    for question in gallery():
        if question.task in ("context_qa", "needle"):
            assert question.answer in question.context + question.prompt


def test_facts_are_those_of_the_country():
    for question in gallery():
        if question.task == "facts":
            assert any(
                name in question.prompt and question.answer in known.values() for name, known in facts.COUNTRY.items()
            )


def test_the_schema_of_a_lane_is_that_of_its_record():
    for question in gallery():
        sources = [
            knobs["source"]
            for lane in question.settings["lanes"]
            for name, knobs in lane.get("extras", [])
            if name == "json_schema"
        ]
        assert bool(sources) == (question.task == "records")
        for source in sources:
            jsonschema.validate(json.loads(question.answer), json.loads(source))


# --- lookup and sampling ---

def test_a_question_is_recognised_by_its_exact_text():
    question = next(question for question in gallery() if question.before)
    assert known(question.prompt, [list(turn) for turn in question.before]) == question
    assert known(question.prompt) is None and known(question.prompt + " ", question.before) is None
    against = next(question for question in gallery() if question.context)
    assert (
        known(against.prompt, context=against.context) == against and known(against.prompt, context="Nothing.") is None
    )


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_questions_without_descriptions(task):
    asked = ask(task, 3, 11)
    assert asked == ask(task, 3, 11) != ask(task, 3, 12)
    for question in asked:
        assert question.task == task and question.look == "" and json.dumps(question.meta)
        assert question.answer is None or judge(question, question.answer) == 1


def test_a_passage_becomes_the_context_and_is_read_as_in_training():
    question = ask("context_qa", 1, 5)[0]
    whole = Prompt(question.prompt, chat=True, context=question.context).whole()
    assert whole == f"Read this: {question.context} Now answer: {question.prompt}"
    against = from_item(context_qa.contradicting(random.Random(1)))
    assert against.meta["memory"] not in (None, against.answer)


def test_an_unknown_grade_or_task_is_refused():
    for task, grade in (("history", None), ("needle", 9)):
        with pytest.raises(Refusal):
            ask(task, 1, 1, grade)


def test_unparsable_answers_are_wrong():
    record, problem = ask("records", 1, 1)[0], from_item(arithmetic.problem(random.Random(2), 2))
    assert judge(record, "[" * 100_000) == judge(problem, "#### " + "1" * 9000) == 0


# --- programs ---

@pytest.mark.parametrize(
    "body",
    [
        "g = (g.gi_frame.f_back for x in [1])\n    return list(g)",
        "return '{0.__class__}'.format(items)",
        "import os",
        "return open('/etc/passwd').read()",
        "return ().__class__",
        "while True:\n        pass",
        "return 'a' * 10 ** 8",
        "return 'a' * 10 ** 11",
    ],
)
def test_a_program_that_breaks_the_sandbox_policy_is_not_run(body):
    assert programs.run(f"def work(items):\n    {body}", "work") is None


def test_a_public_page_runs_no_program_unless_its_owner_says_so(monkeypatch):
    question = next(question for question in gallery() if question.task == "programs")
    monkeypatch.setenv("PLAYGROUND_PUBLIC", "1")
    assert not Site.from_environment(ModelRequest()).rules.programs
    assert verdict(question, question.answer, runs_programs=False) == Judged(0.0, question.answer, checked=False)
    assert verdict(ROMAN, "abc", runs_programs=False) == Judged(1.0, "abc")
    monkeypatch.setenv("PLAYGROUND_RUN_PROGRAMS", "1")
    assert Site.from_environment(ModelRequest()).rules.programs
    assert verdict(question, question.answer).score == 1


# --- in a session ---

def answered(question: Question | None, *configs: LaneConfig, prompt: str = "abc") -> list[Result]:
    session = prepare(
        Models(TableModel("abcde")),
        list(configs or [LaneConfig("greedy")]),
        Prompt(prompt),
        Limits(0, 4),
        judge=judging(question),
    )
    list(session)
    assert check(session.trace) == []
    return [Result(session.trace.lane(header.lane)) for header in session.headers]


def test_a_lane_is_judged_once_by_its_final_text_just_before_it_ends():
    plain = answered(None)[0]
    assert plain.judged is None and "judged" not in plain.to_dict()
    for answer, score in ((plain.text, 1.0), ("something else", 0.0)):
        result = answered(replace(ROMAN, answer=answer))[0]
        kinds = [stamped.event.kind for stamped in result.trace.events]
        assert (
            result.judged == Judged(score, answer) and kinds[-2:] == ["judged", "done"] and kinds.count("judged") == 1
        )
        assert result.to_dict()["judged"] == {"score": score, "expected": answer, "checked": True, "why": ""}


def test_a_lane_of_several_sequences_is_judged_by_the_one_that_became_its_text():
    beams = answered(ROMAN, LaneConfig("beam_search"))[0]
    assert answered(replace(ROMAN, answer=beams.text), LaneConfig("beam_search"))[0].judged.score == 1


def test_a_lane_that_was_stopped_or_failed_is_not_judged():
    refused, fine = answered(ROMAN, LaneConfig("speculative"), LaneConfig("greedy"))
    assert refused.reason == "failed" and refused.judged is None and fine.judged
    session = prepare(
        Models(TableModel("abcde")), [LaneConfig("greedy")], Prompt("abc"), Limits(0, 4), judge=judging(ROMAN)
    )
    while not any(isinstance(stamped.event, Commit) for stamped in session.advance()):
        pass
    session.stop()
    assert Result(session.trace).judged is None and Result(session.trace).reason == "stopped"


def test_a_saved_trace_keeps_the_verdict_and_a_contradictory_one_is_reported(tmp_path):
    result = answered(ROMAN)[0]
    result.trace.save(tmp_path / "run.jsonl")
    assert Result(Trace.load(tmp_path / "run.jsonl")).judged == result.judged
    result.trace.events[-2] = result.trace.events[-2]._replace(event=Judged(7.0))
    assert any("not between 0 and 1" in complaint for complaint in check(result.trace))
    result.trace.events[0] = result.trace.events[0]._replace(event=Judged(1.0))
    assert any("a text that is not complete" in complaint for complaint in check(result.trace))


@pytest.mark.parametrize("judged, said", [
    (Judged(1.0, "smith"), "greedy: right"), (Judged(0.0, "smith"), "greedy: wrong; expected: smith"),
    (Judged(0.5, "a\nb"), "greedy: partly right, 0.50 of 1; expected:\na\nb"),
    (Judged(0.0, "\x1b[2J", checked=False),
     "greedy: not checked, since programs are not run here; expected: \ufffd[2J")])
def test_the_shell_says_what_became_of_the_answer(judged, said):
    result = answered(ROMAN)[0]
    result.trace.events[-2] = result.trace.events[-2]._replace(event=judged)
    assert isinstance(result.trace.events[-1].event, Done) and screen.costs([result]).endswith(said)


# --- earlier turns ---

def test_earlier_turns_come_before_the_prompt_in_the_chat_form():
    model = pair().target
    ids = Prompt("red fox", chat=True, before=(("green", "bird"),)).encode(model)
    text = "".join(model.tokens.pieces(ids))
    assert text.index("green") < text.index("bird") < text.index("red fox")
    session = prepare(
        pair(), [LaneConfig("greedy")], Prompt("red fox", chat=True, before=(("green", "bird"),)), Limits(0, 1)
    )
    assert session.headers[0].before == [("green", "bird")] and session.headers[0].prompt_ids == ids


def test_earlier_turns_without_a_chat_are_refused():
    with pytest.raises(Refusal, match="turn chat on") as refused:
        Prompt("red fox", before=(("green", "bird"),)).encode(pair().target)
    assert refused.value.about == "before"
    with pytest.raises(Refusal, match="turn chat on"):
        Settings("red fox", "raw", before=[["green", "bird"]]).check(Rules())


def test_untrusted_turns_are_pairs_of_texts_or_dropped():
    raw = [["a", "b"], ["c"], "de", 7, None, ["f", 8], ("g", "h")]
    assert Settings.read({"before": raw}).before == [["a", "b"], ["g", "h"]]
    assert (
        Settings.read({"before": "ab"}).before == [] and len(Settings.read({"before": [["a", "b"]] * 99}).before) == 32
    )
    with pytest.raises(Refusal, match="more than 4,000"):
        Settings("hello", "chat", before=[["x" * 5000, "y"]]).check(Rules.for_visitors())


def test_a_link_carries_earlier_turns():
    settings = Settings("hello", "chat", before=[["a", "b"]])
    assert Settings.from_code(settings.to_code()) == settings and settings.turns() == (("a", "b"),)


def test_the_description_is_shown_for_known_questions_only():
    question = next(question for question in gallery() if question.before)
    settings = Settings.read(picked("questions", gallery().index(question)))
    assert "The answer is known" in question_note(settings) and question.answer in question_note(settings)
    assert (
        question_note(replace(settings, before=[]))
        == question_note(replace(settings, mode="raw"))
        == question_note(Settings("<b>"))
        == ""
    )


def test_an_example_clears_the_inputs_of_a_question():
    assert picked("examples", 0)["before"] == [] and picked("examples", 0)["context"] == ""


def test_questions_are_read_from_their_file_once():
    assert questions.gallery() is questions.gallery()
