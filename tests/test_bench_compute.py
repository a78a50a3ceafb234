"""The benchmark of compute policies: shares of FLOPs and of time, and which tasks meet the aim."""
from __future__ import annotations

from dataclasses import replace

import pytest
from pairs import pair

from playground.bench.compute import compute_report as report
from playground.bench.compute.compute_lanes import PLAIN, SETTINGS, entrants, policies
from playground.bench.survey.results import Score
from playground.bench.survey.survey import Answer, survey
from playground.cli import main
from playground.contract import make
from playground.decoding.limits import Limits
from playground.errors import Refusal
from playground.questions.questions import Question

QUESTIONS = [Question(task, text, "bird", chat=False) for task in ("one", "two") for text in ("The green", "A red fox")]


@pytest.fixture(scope="module")
def rows() -> list[report.ComputeRow]:
    lanes = entrants(["ffn_skip", "cfsp"])
    for lane in lanes:  # the tiny networks have fewer channels than a multiple of the default
        lane.config.extras[:] = [(name, {**knobs, "multiple": 1} if name == "cfsp" else knobs)
                                 for name, knobs in lane.config.extras]
    answers = list(survey(pair(), lanes, QUESTIONS, 1, Limits(0, 10), judge=lambda question, text: 1.0, warm_up=False))
    assert not [answer.failure for answer in answers if answer.failure]
    return report.table(answers, pair())


def test_every_policy_is_measured_at_settings_that_exist():
    assert set(SETTINGS) <= set(policies())
    for name, settings in SETTINGS.items():
        for knobs in settings:
            make(name, **knobs)


@pytest.mark.slow
def test_plain_decoding_computes_exactly_what_its_texts_take(rows):
    for row in rows:
        if row.lane == PLAIN:
            assert (row.flops, row.seconds, row.compared) == (pytest.approx(1.0, abs=1e-12), 1.0, 2)


def test_a_policy_that_leaves_out_more_computes_less(rows):
    shares = [row.flops for row in rows if row.lane.startswith("cfsp") and row.task == "one"]
    assert shares == sorted(shares, reverse=True) and 0.3 < shares[-1] < shares[0] < 1


def made(lane: str, task: str, score: float, flops: float) -> report.ComputeRow:
    return report.ComputeRow(lane, task, Score(score, 0.1, 4), flops, 0.5, 4)


def test_a_task_meets_the_aim_by_flops_and_score_together():
    found = [made(PLAIN, "a", 0.9, 1.0), made(PLAIN, "b", 0.5, 1.0), made("cfsp x", "a", 0.88, 0.69),
             made("cfsp x", "b", 0.46, 0.5), made("cfsp y", "a", 0.9, 0.7), made("cfsp y", "b", 0.6, 0.2)]
    assert report.reached(found, "cfsp x") == ["a"] and report.reached(found, "cfsp y") == ["b"]
    assert report.overview(found)[2] == ["cfsp x", "0.670", "0.595", "0.500", "1: a"]


def test_the_findings_name_who_meets_the_aim_who_does_not_and_why_and_who_took_longer():
    found = [made(PLAIN, task, 0.9, 1.0) for task in "abcd"] + [made("cfsp x", task, 0.9, 0.6) for task in "abcd"]
    slow = [replace(made("evopress y", task, 0.2, 0.6), seconds=1.5) for task in "abcd"]
    assert report.findings([*found, *slow]).startswith(
        f"The aim is met by `cfsp x` on 4 tasks. No setting of `evopress` meets it: {report.WHY_NOT['evopress']}. Of 2 "
        "lanes 1 took longer"
    )
    assert set(report.WHY_NOT) < set(policies())
    assert report.findings(slow + found[:4]).startswith("No policy meets the aim.")


def test_times_are_compared_where_both_lanes_wrote_equally_many_tokens():
    plain, other = (Answer(lane, number, QUESTIONS[0], 1, 0, token_ids=[1] * length, seconds=seconds, score=1.0,
                           reason="end")
                    for lane, number, length, seconds in ((PLAIN, 0, 3, 2.0), ("cfsp", 0, 3, 1.0)))
    longer = [replace(plain, number=1, seconds=2.0), replace(other, number=1, token_ids=[1] * 9, seconds=90.0)]
    row = report.table([plain, other, *longer], pair())[1]
    assert (row.seconds, row.compared) == (0.5, 1)


def test_the_page_has_a_line_for_every_lane_and_the_chart_a_curve_for_every_policy(rows):
    page, chart = report.page({"settings": {}}, rows, "compute.svg"), report.chart(rows)
    assert all(f"| {row.lane} |" in page for row in rows)
    assert list(chart.series) == ["ffn_skip", "cfsp"]
    assert all(curve[-1] == (1.0, 0.0) for curve in chart.series.values())
    assert chart.svg().startswith("<svg")


def test_only_compute_policies_can_be_named():
    with pytest.raises(Refusal, match="greedy is no compute policy"):
        entrants(["greedy"])
    assert main(["bench", "compute", "--only", "greedy"]) == 2


def test_rows_that_were_measured_before_are_kept_unless_they_are_measured_again(rows):
    from playground.cli.bench.compute import _joined
    before = {"settings": {"seed": 1}, "rows": report.document({}, rows)["rows"]}
    later = [made(PLAIN, "one", 1.0, 1.0), made("ffn_skip new", "one", 0.5, 0.6)]
    joined = _joined(before, {"seed": 1}, later)
    assert joined[:2] == rows[:2] and joined[-1] == later[1]
    assert not [row for row in joined[:-1] if row.lane.startswith("ffn_skip")]
    with pytest.raises(Refusal, match="measured with another seed"):
        _joined(before, {"seed": 2}, later)


def test_what_was_added_names_its_processor_after_what_was_added_before():
    from playground.cli.bench.compute import _measured_later
    lanes, now = entrants(["ffn_skip"]), {"processor": "this one"}
    once = _measured_later({}, lanes, now)["measured_later"]
    twice = _measured_later({"measured_later": "acm on another"}, lanes, now)["measured_later"]
    assert once.startswith("ffn_skip on this one, load average") and twice == f"acm on another; {once}"


def test_a_lane_that_was_measured_on_fewer_tasks_says_so_and_is_not_in_the_chart():
    found = [made(PLAIN, "a", 0.9, 1.0), made(PLAIN, "b", 0.5, 1.0), made("cfsp", "a", 0.9, 0.6),
             made("acm", "a", 0.8, 0.6), made("acm", "b", 0.4, 0.6)]
    assert report.overview(found)[2][0] == "cfsp, on 1 of 2 tasks"
    assert "cfsp" not in report.chart(found).svg() and "acm" in report.chart(found).svg()
