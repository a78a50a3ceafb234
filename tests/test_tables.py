"""Tables of a run: draft tokens, rounds and alternatives say what the events and the text say."""
from __future__ import annotations

import pandas
import pytest

import playground
from playground import events
from playground.events import Candidate, Commit, Draft, Header, Rollback, Stamped, Step, Verdict
from playground.trace import Trace
from playground.trace.result import Result
from support.api_models import PROMPT, models, saved  # noqa: F401
from support.speculation import speculative_lane

TREE = Draft(0, [5, 6, 7], ["a", "b", "c"], [-1, -1, 0], [0.5, 0.25, 1.0], "some")


def result(*given) -> Result:
    return Result(Trace([Header(strategy="some")], [Stamped(0, n, 0.0, event) for n, event in enumerate(given)]))


def test_a_draft_tree_has_a_row_for_each_node_with_its_depth_and_its_test():
    tests = [
        events.Test(1, 0.1, 0.25, 0.9, False), events.Test(0, 0.4, 0.5, 0.2, True), events.Test(2, 0.0, 1.0, 0.3, False)
    ]
    found = result(
        Commit(0, [1, 2], ["x", "y"]), TREE, Verdict(0, [0], tests, 9, "d", "redraw"), Commit(2, [5, 9], ["a", "d"]),
    )
    drafts = found.drafts()
    assert drafts[["node", "parent", "depth", "position", "text"]].values.tolist() == [
        [0, -1, 1, 2, "a"], [1, -1, 1, 2, "b"], [2, 0, 2, 3, "c"],
    ]
    assert drafts["target_probability"].tolist() == [0.4, 0.1, 0.0]
    assert drafts["accepted"].tolist() == [True, False, False]
    assert found.rounds().values.tolist() == [[0, 0, 2, 3, 1, 9, "d", "redraw"]]


def test_a_token_that_was_not_tested_has_no_target_probability():
    drafts = result(TREE, Verdict(0, [], [events.Test(0, 0.0, 0.5, 0.9, False)], 9, "d", "redraw")).drafts()
    assert drafts["tested"].tolist() == [True, False, False]
    assert drafts["target_probability"].isna().tolist() == [False, True, True]


def test_a_round_without_a_token_of_the_targets_own_says_so():
    (row,) = result(TREE, Verdict(0, [0, 2])).rounds().to_dict("records")
    assert row["accepted"] == 2 and pandas.isna(row["id"]) and row["origin"] is None


def test_a_draft_that_was_never_verified_is_left_out():
    found = result(TREE)
    assert found.drafts().empty and found.rounds().empty and "accepted" in found.drafts().columns


def test_alternatives_are_ranked_by_the_models_own_probability_and_name_the_stage_that_removed_one():
    top = [Candidate(2, "b", 0.3, 1.0), Candidate(1, "a", 0.6, 0.0, "top_k")]
    found = result(Step(0, 0.9, 0.0, 2, top), Commit(0, [2], ["b"])).alternatives()
    assert found[["rank", "text", "chosen"]].values.tolist() == [[1, "a", False], [2, "b", True]]
    assert found["removed_by"][0] == "top_k" and pandas.isna(found["removed_by"][1])


def test_alternatives_to_what_was_taken_back_are_left_out():
    top = [Candidate(2, "b", 0.3, 1.0)]
    assert result(Step(0, 0.9, 0.0, 2, top), Commit(0, [2], ["b"]), Rollback(1)).alternatives().empty


@pytest.mark.parametrize("drafter", ["draft_model", "rsd_s"])
def test_the_tables_of_a_speculative_run_agree_with_its_text_and_metrics(models, drafter):  # noqa: F811
    (found,) = playground.compare(
        [speculative_lane(drafter, "rejection")], PROMPT, models=models, seed=3, max_new_tokens=24
    )
    drafts, rounds, metrics = found.drafts(), found.rounds(), found.metrics
    assert drafts["tested"].sum() and drafts["accepted"].sum() / drafts["tested"].sum() == metrics["acceptance_rate"]
    assert rounds["accepted"].mean() == pytest.approx(metrics["mean_accepted"])
    assert rounds["drafted"].sum() == len(drafts) and rounds["accepted"].sum() == drafts["accepted"].sum()
    for row in drafts[drafts["accepted"]].itertuples():
        assert found.token_ids[row.position] == row.id
    for row in rounds.dropna(subset="id").itertuples():
        if row.position + row.accepted < len(found.token_ids):
            assert found.token_ids[row.position + row.accepted] == row.id


def test_the_alternatives_of_a_greedy_run_begin_with_its_tokens(models):  # noqa: F811
    found = playground.run("greedy", PROMPT, models=models, max_new_tokens=12)
    table = found.alternatives()
    first = table[table["rank"] == 1]
    assert first["id"].tolist() == found.token_ids and first["chosen"].all()
    assert (table.groupby("position")["probability"].sum() <= 1 + 1e-6).all() and len(table) > len(first)
