"""A survey counts what the lanes did, holds entrants against each other within rounds, and lets no lane spoil it for
others.
"""
from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from pairs import pair

import playground
from playground.bench.survey.results import Score, paired, sections, sign_test, table
from playground.bench.survey.survey import Answer, Entrant, Progress, score, survey
from playground.bench.survey.survey_export import as_csv, document, page
from playground.bench.survey.survey_figures import acceptance, quality
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.errors import Refusal
from playground.questions.questions import Question, ask
from playground.questions.user_questions import questions_in
from playground.trace.lane_metrics import LaneRecord
from playground.trace.plot_style import IN_DARK
from support.plot_colours import colours_of

GREEDY = Entrant("greedy", LaneConfig("greedy"))
SPECULATION = Entrant("speculation", LaneConfig("speculative", extras=[("draft_model", {"depth": 3})]))
DRAWING = Entrant("drawing", LaneConfig("sample", {"temperature": 1.5, "top_p": 1.0}))
NEEDY = Entrant("needy", LaneConfig("greedy", extras=[("cad", {})]))  # wants a context that the questions do not have
BIRD, FOX = questions_in("""{"task": "birds", "prompt": "The green bird", "answer": "x"}
{"task": "foxes", "prompt": "The red fox", "answer": "e", "contains": true}""")


def asked(
    entrants: list[Entrant], questions: list[Question], repeats: int = 1, length: int = 12, **more
) -> list[Answer]:
    return list(survey(pair(), entrants, questions, repeats, Limits(max_new_tokens=length), warm_up=False, **more))


def made(entrant: str = "greedy", number: int = 0, round: int = 1, **facts) -> Answer:
    return Answer(
        entrant, number, facts.pop("question", BIRD), round, seed=0, **{"token_ids": [5, 6, 7], "seconds": 1.0, **facts}
    )


# --- asking ---

def test_the_costs_of_an_answer_are_those_of_its_trace():
    answer, = asked([SPECULATION], [BIRD], length=16)
    (lane,) = playground.compare(
        [SPECULATION.config], BIRD.prompt, models=pair(), chat=True, seed=answer.seed, max_new_tokens=16
    )
    trials = LaneRecord(lane.trace.events).trials()
    assert answer.token_ids == lane.token_ids and answer.text == lane.text and answer.reason == lane.reason
    assert answer.forwards == lane.metrics["forwards"] and {"target", "draft"} <= answer.forwards.keys()
    assert (answer.accepted, answer.tested) == (sum(kept for _, kept in trials), len(trials)) and answer.tested > 0
    assert [accepted / tested for accepted, tested in answer.trials] == lane.metrics["acceptance_by_position"]
    assert (answer.kv_live, answer.flops) == (lane.metrics["kv_live_peak"], lane.metrics["flops"])
    assert sum(answer.wrote.values()) == len(answer.token_ids) and 0 < answer.clock <= answer.seconds


def test_a_lane_that_fails_or_is_refused_does_not_affect_the_others():
    endless, unruly = (
        replace(BIRD, prompt="bird " * 500),
        Entrant("unruly", LaneConfig("greedy", extras=[("regex", {"pattern": "("})])),
    )
    answers = asked([unruly, GREEDY], [BIRD, endless])
    recorded = {(answer.entrant, answer.number): answer.failure for answer in answers}
    assert recorded["unruly", 0] and "shorten it" in recorded["greedy", 1]
    assert recorded["greedy", 0] == "" and len(answers) == 4
    assert next(answer for answer in answers if answer.failure).score is None


def test_a_strategy_whose_input_is_missing_is_not_asked_and_does_not_fail():
    recorded = replace(BIRD, context="A red fox met a green bird.")
    bare, asked_ = asked([NEEDY], [BIRD, recorded])
    assert (bare.lacking, bare.failure, bare.reason, bare.token_ids) == ("a passage", "", "not asked", [])
    assert (asked_.lacking, asked_.failure) == ("", "") and asked_.token_ids


def test_cancelling_stops_within_a_question():
    calls = []
    answers = asked([GREEDY], [BIRD], length=64, cancelled=lambda: calls.append(1) or len(calls) > 5)
    assert answers == [] and len(calls) == 6


def test_the_order_rotates_so_that_nothing_always_follows_the_same_other():
    entrants = [replace(GREEDY, name=name) for name in "abc"]
    assert (
        "".join(answer.entrant for answer in asked(entrants, [BIRD, FOX, BIRD], 2, length=1))
        == "abcbcacab" + "bcacababc"
    )


def test_seeds_differ_by_question_and_round_and_are_shared_by_entrants():
    answers = asked([DRAWING, replace(DRAWING, name="again")], [BIRD, FOX], 2)
    seeds = {(answer.number, answer.round, answer.seed) for answer in answers}
    assert len(seeds) == len({seed for _, _, seed in seeds}) == 4 and len(answers) == 8
    first, second = (answer for answer in answers if answer.entrant == "drawing" and answer.number == 0)
    assert first.token_ids != second.token_ids
    assert all(row.same_text == row.compared == 2 for row in table(answers) if row.entrant == "again")


def test_a_warm_up_is_dropped():
    assert [answer.round for answer in survey(pair(), [GREEDY], [BIRD, FOX], 1, Limits(max_new_tokens=2))] == [1, 1]


def test_a_wrong_judge_gives_other_scores():
    right, wrong = (
        asked([GREEDY], [FOX]),
        asked([GREEDY], [FOX], judge=lambda question, text: 1.0 - score(question, text)),
    )
    assert right[0].text == wrong[0].text and right[0].score + wrong[0].score == 1.0
    assert table(right)[0].score.mean != table(wrong)[0].score.mean


def test_the_small_world_judges_its_own_questions():
    question, = ask("arithmetic", 1, seed=3)
    assert score(question, question.answer) == 1.0 and score(question, "#### nothing") == 0.0


@pytest.mark.parametrize(
    "entrants, questions, repeats, about",
    [
        ([], [BIRD], 1, "entrants"),
        ([GREEDY, GREEDY], [BIRD], 1, "entrants"),
        ([GREEDY], [], 1, "questions"),
        ([GREEDY], [BIRD], 0, "repeats"),
    ],
)
def test_a_survey_of_nothing_is_refused(entrants, questions, repeats, about):
    with pytest.raises(Refusal) as refusal:
        asked(entrants, questions, repeats)
    assert refusal.value.about == about


def test_time_left_is_estimated_from_measured_answers_only():
    progress = Progress([GREEDY, SPECULATION], [BIRD, FOX], repeats=2)
    for answer in (
        made("greedy", seconds=1.0),
        made("speculation", seconds=2.0),
        made("greedy", question=FOX, seconds=3.0),
    ):
        progress.count(answer)
        assert progress.left is None
    progress.count(made("speculation", question=FOX, seconds=4.0))
    assert progress.left == 1.0 + 2.0 + 3.0 + 4.0 and progress.share == 0.5


# --- results ---

def test_times_are_compared_within_a_round():
    seconds = {"greedy": (1.0, 10.0, 1.0), "speculation": (0.5, 20.0, 0.25)}
    answers = [made(name, round=r, seconds=s) for name, each in seconds.items() for r, s in enumerate(each, 1)]
    assert table(answers)[1].time_ratio == (0.5, 0.25, 2.0)
    assert table(answers)[1].tokens_per_second == (6.0, 0.15, 12.0)


def test_a_failed_question_is_excluded_from_the_ratio():
    answers = [
        made("greedy", 0),
        made("greedy", 1, seconds=100.0),
        made("speculation", 0, seconds=0.5),
        made("speculation", 1, failure="It broke.", seconds=9.0),
    ]
    row = table(answers)[1]
    assert row.time_ratio.median == 0.5 and (row.answers, row.failed, row.failure, row.compared) == (
        1,
        1,
        "It broke.",
        1,
    )


def test_a_strategy_that_was_not_asked_has_dashes_and_a_sentence_says_why():
    answers = [
        made(),
        made("needy", lacking="a passage"),
        made("other", lacking="tests"),
        made("half", 0, lacking="a passage"),
        made("half", 1),
    ]
    section, = sections(table(answers))
    rows = {row[0]: row[1:] for row in section.rows}
    assert set(rows["needy"]) == set(rows["other"]) == {"-", ""} and rows["needy"][-1] == "" and rows["half"][1] == "3"
    assert section.remarks == [
        "Not asked, since the questions lack inputs: a passage for needy, half (1 of 2 answers); tests for other."
    ]
    assert sections(table([made()]))[0].remarks == [] and section.remarks[0] in page("Survey", {}, answers)


def test_failures_and_missing_inputs_are_distinguished():
    """The same rows with the sentence in the other place: one failed, and nothing explains it away."""
    section, = sections(table([made(), made("needy", failure="a passage")]))
    assert section.rows[2][-1] == "1" and section.remarks == []


def test_forwards_are_counted_per_token_after_the_first():
    plain, speculation = table(
        [made(forwards={"target": 2}), made("speculation", forwards={"target": 1, "draft": 5}, trials=[(1, 2), (0, 1)])]
    )
    assert (plain.target_forwards, plain.other_forwards) == (1.0, 0.0)
    assert (speculation.target_forwards, speculation.other_forwards) == (0.5, 2.5)
    assert (
        speculation.acceptance == 1 / 3
        and speculation.acceptance_by_position == [0.5, 0.0]
        and plain.acceptance is None
    )


def test_plain_decoding_takes_one_forward_a_token():
    assert [row.target_forwards for row in table(asked([GREEDY], [BIRD, FOX]))] == [1.0, 1.0]


def test_rounds_of_one_question_are_one_measurement_of_its_score():
    answers = [made(number=n, round=r, score=float(n)) for n in range(2) for r in range(1, 6)]
    assert table(answers)[0].score == Score(0.5, 0.5, 2)


def test_a_score_of_one_question_has_no_error_and_one_of_none_is_missing():
    assert table([made(score=1.0)])[0].score == Score(1.0, None, 1)
    assert table([made()])[0].score is None


def test_entrants_are_paired_question_by_question():
    ours, theirs = [1, 1, 1, 0], [0, 0, 1, 1]
    gap = paired(
        [made(number=n, score=float(s)) for n, s in enumerate(ours)],
        [made(number=n, score=float(s)) for n, s in enumerate(theirs)],
    )
    assert (gap.mean, gap.better, gap.worse) == (0.25, 2, 1) and gap.p == 1.0
    assert paired([made(number=0, score=1.0)], [made(number=1, score=1.0)]) is None


@pytest.mark.parametrize("better, worse, p", [(0, 0, 1.0), (5, 0, 2 / 32), (1, 5, 14 / 64), (3, 3, 1.0)])
def test_a_sign_test_is_that_of_fair_coins(better, worse, p):
    assert sign_test(better, worse) == sign_test(worse, better) == pytest.approx(p)


# --- on paper ---

def test_the_csv_has_one_row_per_answer_for_any_text():
    nasty = 'a,"b"\n=1+1;\r\n<script>'
    answers = [
        made(text=nasty, trials=[(1, 2)], score=0.5, forwards={"target": 2}),
        made("speculation", failure="It broke, quite."),
    ]
    lines = list(csv.DictReader(io.StringIO(as_csv(answers), newline="")))
    assert [line["text"] for line in lines] == [nasty, ""] and lines[0]["prompt"] == BIRD.prompt
    assert (
        lines[0]["tested_1"],
        lines[0]["accepted_1"],
        lines[1]["tested_1"],
        lines[0]["score"],
        lines[1]["score"],
    ) == ("2", "1", "", "0.5", "")
    assert lines[1]["failure"] == "It broke, quite."


def test_the_json_holds_every_answer_and_the_table():
    answers = asked([GREEDY, NEEDY], [BIRD])
    recorded = json.loads(
        json.dumps(document({"settings": {"model": "toy"}}, [GREEDY, NEEDY], [BIRD], answers), allow_nan=False)
    )
    assert [answer["entrant"] for answer in recorded["answers"]] == ["greedy", "needy"] and recorded["questions"][0][
        "prompt"
    ] == BIRD.prompt
    assert (
        recorded["table"][0]["tokens"] == len(recorded["answers"][0]["token_ids"])
        and recorded["table"][1]["unasked"] == 1
    )
    assert recorded["entrants"][1]["extras"] == [["cad", {}]] and recorded["settings"]["model"] == "toy"


def test_a_page_keeps_its_tables_whatever_an_entrant_is_called():
    written = page("Survey", {"settings": {"model": "a|b"}}, [made("x | y\nz", score=1.0)])
    assert "| x / y z |" in written and "| a/b |" in written


def test_figures_show_the_values_of_the_table():
    rows = table(
        [
            made("<b>greedy</b>", score=1.0, forwards={"target": 2}),
            made("speculation", score=0.0, forwards={"target": 1}, trials=[(1, 2), (1, 1)]),
        ]
    )
    drawn, depths = quality(rows), acceptance(rows)
    assert [(trace.x[0], trace.y[0]) for trace in drawn.data] == [(1.0, 1.0), (0.5, 0.0)]
    assert "<b>" not in drawn.data[0].name and list(depths.data[0].y) == [0.5, 1.0]


def test_the_second_four_entrants_have_the_hues_of_the_first_and_open_markers():
    rows = table([made(f"entrant {i}", score=1.0, forwards={"target": 1}, trials=[(1, 2)]) for i in range(8)])
    for figure in (quality(rows), acceptance(rows)):
        looks = [(trace.marker.color or trace.line.color, "open" in str(trace.marker.symbol)) for trace in figure.data]
        assert len(set(looks)) == 8 and looks[0][0] == looks[4][0]
        assert colours_of(figure) <= IN_DARK.keys()


def test_unmeasured_values_are_not_drawn():
    rows = table([made()])
    assert quality(rows) is None and acceptance(rows) is None
