"""Inputs that questions provide besides their prompt: they describe the task and never reveal the answer."""
from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
from pairs import pair

from playground.bench.survey.survey import Answer, Entrant, survey
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.errors import Refusal
from playground.questions import question_inputs as brought
from playground.questions.question_inputs import BRINGS, READ_THROUGH, TRUSTED, Lacking, bare, filled
from playground.questions.questions import Question, ask
from playground.questions.user_questions import questions_in
from playground.questions.world import arithmetic, facts, programs
from playground.questions.world.attributes import VALUES
from strategies.search import pg_td

MANY = 24  # questions of a task
TASKS = "facts context_qa arithmetic records edit lists programs needle".split()
BROUGHT = {
    "passage": {"context_qa", "needle"},
    "labels": {"facts", "context_qa"},
    "tests": {"programs"},
    "schema": {"records"},
    "pairs": {"facts", "lists"},
    "cue": {"arithmetic"},
}


def brings(name: str, task: str, count: int = MANY) -> list[tuple[Question, str]]:
    """The questions of a task that provide an input, with that input."""
    return [(question, found) for question in ask(task, count, 5) if (found := BRINGS[name][1](question))]


@pytest.mark.parametrize("name", BRINGS)
def test_each_task_provides_its_own_inputs_only(name):
    assert {task for task in TASKS if brings(name, task, 4)} == BROUGHT[name]


def test_a_passage_holds_the_answer_and_is_what_the_question_is_about():
    for task in ("context_qa", READ_THROUGH):
        found = brings("passage", task)
        assert len(found) == MANY and all(question.answer in passage for question, passage in found)


@pytest.mark.parametrize("task", ["facts", "context_qa"])
def test_labels_are_all_values_of_the_attribute_whichever_is_right(task):
    found = brings("labels", task)
    assert len(found) > MANY / 2
    for question, labels in found:
        attribute = question.meta["kind" if task == "facts" else "attribute"]
        assert question.answer in labels.split("|") == list(VALUES[attribute])
        other = next(value for value in VALUES[attribute] if value != question.answer)
        assert brought.labels(replace(question, answer=other)) == labels


def test_a_question_for_the_subject_provides_no_labels():
    backwards = [
        question
        for question in ask("context_qa", 60, 5, 2)
        if question.answer not in VALUES[question.meta["attribute"]]
    ]
    assert backwards and not any(map(brought.labels, backwards))


def overlap(question: Question, lines: str) -> bool:
    """Whether a test that guides a search is among those that judge its result."""
    return any(given in programs.INPUTS[question.meta["takes"]] for given in pg_td.Tests.read(lines).arguments)


@pytest.mark.slow
def test_guiding_tests_pass_with_the_known_program_and_differ_from_judging_tests():
    found = brings("tests", "programs", 12)
    assert len(found) > 9
    for question, lines in found:
        tests = pg_td.Tests.read(lines)
        assert tests.passed(question.answer) == 1 and not overlap(question, lines)
        assert tests.passed(question.answer.replace("return", "pass #")) == 0


def test_guiding_tests_that_also_judge_are_detected(monkeypatch):
    monkeypatch.setattr(programs, "GUIDES", programs.INPUTS)
    assert all(overlap(question, lines) for question, lines in brings("tests", "programs", 4))


@pytest.mark.slow
def test_tests_distinguish_programs():
    """Of all pairs of programs that take the same, at most one in four pass each other's tests."""
    found = brings("tests", "programs", 16)
    crossed = [
        pg_td.Tests.read(lines).passed(
            other.answer.replace(f"def {other.meta['name']}(", f"def {question.meta['name']}(")
        )
        for question, lines in found
        for other, _ in found[:4]
        if other is not question and other.meta["takes"] == question.meta["takes"]
    ]
    assert len(crossed) > 10 and sum(share == 1 for share in crossed) / len(crossed) < 0.25


def test_a_schema_is_the_one_of_the_record():
    for question, source in brings("schema", "records"):
        jsonschema.validate(json.loads(question.answer), json.loads(source))


@pytest.mark.parametrize("task", ["facts", "lists"])
def test_trusted_answers_are_right_and_belong_to_other_questions(task):
    for question, lines in brings("pairs", task):
        pairs = [line.split(" => ") for line in lines.splitlines()]
        assert len(pairs) == TRUSTED and question.prompt not in [asked for asked, _ in pairs]
        if task == "facts":
            assert all(question.meta["subject"] not in asked for asked, _ in pairs)
            assert all(
                any(subject in asked and answer in known.values() for subject, known in facts.COUNTRY.items())
                for asked, answer in pairs
            )


def test_a_number_after_the_cue_is_judged_by_the_rule_of_the_task():
    for question, cue in brings("cue", "arithmetic"):
        text = f"Well.\n{cue} {question.meta['final']}\""
        assert arithmetic.score(question, text) == 1 and arithmetic.score(question, text.replace(cue, "so")) == 0


# --- in an entrant ---

RED = "What colour does Nobody like?"
ASKED = Question("facts", RED, "red", meta={"kind": "colour", "subject": "Nobody"})


def answered(config: LaneConfig, *questions: Question) -> list[Answer]:
    return list(survey(pair(), [Entrant("one", config)], questions, 1, Limits(max_new_tokens=12), warm_up=False))


def test_a_knob_in_braces_takes_the_questions_input_and_others_stay():
    config = LaneConfig(
        "gencls_ppl", {"labels": "{labels}", "reading": "sum"}, [("json_schema", {"source": "{schema}"})]
    )
    found = filled(config, replace(ASKED, meta=ASKED.meta | {"schema": {"type": "null"}}))
    assert found.knobs == {"labels": "|".join(VALUES["colour"]), "reading": "sum"} and found.extras == [
        ("json_schema", {"source": '{"type": "null"}'})
    ]
    assert bare(config) == LaneConfig("gencls_ppl", {"reading": "sum"}, [("json_schema", {})])
    plain = LaneConfig("greedy", {}, [("regex", {"pattern": "[0-9]{1,3}"})])
    assert filled(plain, ASKED) == bare(plain) == plain


def test_an_entrant_uses_the_questions_inputs_and_is_not_asked_without_them():
    informed, uninformed = answered(
        LaneConfig("gencls_ppl", {"labels": "{labels}"}), ASKED, replace(ASKED, task="edit", meta={})
    )
    assert informed.text.strip() in VALUES["colour"] and not informed.failure and not informed.lacking
    assert uninformed.lacking == "labels to choose from" and not uninformed.failure and uninformed.score is None


def test_an_entrant_that_does_not_say_what_it_needs_would_fail(monkeypatch):
    monkeypatch.setattr(Entrant, "config_for", lambda entrant, question: entrant.config)
    assert answered(LaneConfig("gencls_ppl", {"labels": "{labels}"}), ASKED)[0].failure


def test_user_questions_provide_their_passage_and_run_no_program():
    own, = questions_in('{"prompt": "p", "task": "programs", "answer": "raise SystemExit", "context": "The red fox."}')
    own = replace(own, meta=own.meta | {"name": "work", "takes": "text", "schema": {}})
    assert filled(LaneConfig("exact_extract", {"passage": "{passage}"}), own).knobs["passage"] == "The red fox."
    for name in BRINGS.keys() - {"passage"}:
        with pytest.raises(Lacking):
            filled(LaneConfig("greedy", {"k": f"{{{name}}}"}), own)


def test_an_unknown_input_name_is_refused():
    with pytest.raises(Refusal, match=r"\{labels\}") as refused:
        bare(LaneConfig("gencls_ppl", {"labels": "{answer}"}))
    assert not isinstance(refused.value, Lacking)
