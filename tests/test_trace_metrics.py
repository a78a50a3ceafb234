"""Differences between lanes, and their metrics."""
from __future__ import annotations

import json
import math

import pytest

from playground.events import Branches, Cache, Candidate, Done, Fill, Forward, Mask, Rollback, Step
from playground.trace import diff, metrics
from support.small_traces import END, ONE
from support.traces import commit, draft, everything, greedy, prefill, speculative, trace, verdict

# --- differences ---

def test_equal_texts_have_no_difference():
    assert diff(greedy(1, 2, 3), greedy(1, 2, 3)) is None


def test_how_a_text_was_reached_makes_no_difference():
    assert diff(speculative(), greedy(10, 11, 12, 20, 22, 23)) is None


def test_the_first_difference_comes_with_its_margin_in_logits():
    row = Step(1, top=[Candidate(2, " 2", 0.4, 1.0), Candidate(9, " 9", 0.1, 0.0)])
    found = diff(trace(ONE, row, commit(1, [2]), END), trace(ONE, commit(1, [9]), END))
    assert (found.index, found.a.id, found.b.id, found.b.piece) == (1, 2, 9, " 9")
    assert found.margin == pytest.approx(math.log(0.4 / 0.1)) and not found.prefix
    assert found.sentence() == "Token 1 is ' 2' in the first text and ' 9' in the second; their logits differ by 1.39."


def test_the_margin_may_come_from_the_other_lane():
    row = Step(0, top=[Candidate(1, " 1", 0.2, 0.0), Candidate(2, " 2", 0.4, 1.0)])
    assert diff(greedy(1), trace(row, commit(0, [2]), END)).margin == pytest.approx(math.log(0.2 / 0.4))


def test_without_a_row_that_shows_both_there_is_no_margin():
    found = diff(greedy(1, 2), greedy(1, 3))
    assert found.margin is None and "no step lists both" in found.sentence()


def test_a_row_that_was_taken_back_gives_no_margin():
    row = Step(1, top=[Candidate(2, " 2", 0.5, 1.0), Candidate(3, " 3", 0.5, 1.0)])
    assert diff(trace(ONE, row, commit(1, [4]), Rollback(1, " 1"), commit(1, [2]), END), greedy(1, 3)).margin is None


def test_a_shorter_text_that_agrees_says_why_it_ends():
    found = diff(greedy(1, 2, 3), greedy(1, 2))
    assert found.prefix and (found.index, found.a.id, found.b) == (2, 3, None)
    assert found.sentence() == "The first 2 tokens are the same; then the second text ends at its length limit."
    assert (
        diff(greedy(1, end="end"), greedy(1, 2)).sentence()
        == "The first 1 tokens are the same; then the first text ends."
    )


# --- metrics ---

def test_plain_decoding_gives_exactly_one_token_per_forward():
    found = metrics(greedy(1, 2, 3, 4))
    assert found["tokens"] == 4 and found["target_forwards"] == 3  # the first token came from the prefill row
    assert found["tokens_per_target_forward"] == 1.0 and found["wasted_tokens"] == 0
    assert found["origins"] == {"sampled": 4}


def test_a_forward_that_a_stop_left_without_a_token_is_not_counted_against_the_lane():
    stopped = metrics(trace(prefill(), ONE, Forward(), commit(1, [2]), Forward(), Done("stopped")))
    assert stopped["target_forwards"] == 2 and stopped["tokens_per_target_forward"] == 1.0


def test_a_text_of_one_token_has_no_rate_per_forward():
    assert metrics(greedy(1))["tokens_per_target_forward"] is None


def test_speculation_counts_the_bonus_and_leaves_out_prefill():
    found = metrics(speculative())
    assert found["tokens"] == 1 + 3 + 2
    assert found["tokens_per_target_forward"] == (3 + 2) / 2
    assert found["forwards"] == {"draft": 5, "target": 2} and found["draft_forwards"] == 5


def test_acceptance_is_accepted_over_tested():
    found = metrics(speculative())
    assert found["acceptance_rate"] == (2 + 1) / (3 + 2)
    # both draft tokens of round 1 are first draft tokens
    assert found["acceptance_by_position"] == [(1 + 1) / (1 + 2), 1 / 1, 0 / 1]
    assert found["mean_accepted"] == (2 + 1) / 2


def test_a_depth_at_which_nothing_was_tested_has_no_acceptance():
    found = metrics(trace(draft(0, [5, 6]), verdict(0, [0, 1], 7, tests=[1]), commit(0, [5, 6, 7]), END))
    assert found["acceptance_by_position"] == [None, 1.0]


def test_wasted_rows_are_those_the_text_did_not_need():
    assert metrics(speculative())["wasted_tokens"] == (4 + 3) - (6 - 1)  # one draft token rejected in each round


def test_tokens_taken_back_were_wasted_and_do_not_count():
    found = metrics(
        trace(
            prefill(),
            ONE,
            Forward(),
            commit(1, [2], ["draft"]),
            Forward(),
            commit(2, [3]),
            Rollback(2, " 1"),
            Forward(),
            commit(1, [4]),
            END,
        )
    )
    assert found["tokens"] == 2 and found["origins"] == {"sampled": 2}
    assert found["wasted_tokens"] == 3 - 1
    assert found["tokens_per_target_forward"] == 1 / 3


def test_rows_of_dropped_branches_were_wasted():
    beams = trace(prefill(), ONE, Branches([(1, 0)]), Forward(tokens=2), commit(1, [2]), commit(1, [3], sequence=1),
                  Branches(dropped=[1]), END)
    assert metrics(beams)["wasted_tokens"] == 2 - 1 and metrics(beams)["tokens"] == 2


def test_forced_tokens_cost_no_forward_of_their_own():
    forced = commit(1, [2, 3, 4], ["sampled", "forced", "forced"])
    found = metrics(trace(prefill(), ONE, Forward(), forced, Forward(tokens=3), commit(4, [5]), END))
    assert found["tokens_per_target_forward"] == (3 + 1) / 2 and found["wasted_tokens"] == (1 + 3) - (5 - 1)
    assert found["origins"] == {"sampled": 3, "forced": 2}


def test_a_canvas_wastes_no_rows_of_a_text():
    found = metrics(trace(Forward(tokens=8), Fill([0], [1], [" 1"], [0.9]), commit(0, [1, 2]), END))
    assert found["wasted_tokens"] is None and found["tokens_per_target_forward"] == 2 / 1


def test_time_is_read_from_the_lane_s_own_clock():
    found = metrics(trace(prefill(), ONE, Forward(), commit(1, [2]), END, at=[0.2, 0.25, 0.4, 0.45, 0.5]))
    assert found["seconds"] == 0.5 and found["time_to_first_token"] == 0.25
    assert found["tokens_per_second"] == 2 / 0.5


def test_entropy_is_the_mean_over_the_final_tokens():
    found = metrics(
        trace(Step(0, 1.0), ONE, Step(1, 9.0), commit(1, [2]), Rollback(1, " 1"), Step(1, 2.0), commit(1, [3]), END)
    )
    assert found["mean_entropy"] == (1.0 + 2.0) / 2


def test_cache_peaks_are_over_layers_heads_and_time_of_the_target():
    small = Cache(length=9, layers=1, heads=2, live=[[[(0, 4)], [(0, 2), (5, 9)]]], bytes=600)
    later = Cache(length=9, layers=1, heads=2, live=[[[(0, 1)], [(0, 5)]]], bytes=700)
    found = metrics(trace(small, later, Cache("draft", 50, 1, 1, [[[(0, 50)]]], bytes=9000), END))
    assert found["kv_live_peak"] == 2 + 4 and found["kv_bytes_peak"] == 700


def test_mask_time_is_shared_by_all_tokens():
    found = metrics(trace(Mask(seconds=0.002), ONE, Mask(seconds=0.001), commit(1, [2]), END))
    assert found["mask_seconds_per_token"] == pytest.approx((0.002 + 0.001) / 2)


def test_operations_of_all_streams_and_of_prefill_add_up():
    assert (
        metrics(trace(prefill(flops=5.0), Forward("draft", flops=1.0), Forward(flops=2.0), END))["flops"]
        == 5.0 + 1.0 + 2.0
    )


def test_a_metric_without_meaning_is_null():
    found = metrics(trace(END, at=[0.0]))
    assert {name for name, value in found.items() if value is None} == {
        "tokens_per_second",
        "time_to_first_token",
        "tokens_per_target_forward",
        "acceptance_rate",
        "acceptance_by_position",
        "mean_accepted",
        "mean_entropy",
        "kv_live_peak",
        "kv_bytes_peak",
        "mask_seconds_per_token",
    }
    assert json.loads(json.dumps(found)) == found


def test_metrics_describe_one_lane():
    with pytest.raises(ValueError, match="one lane"):
        metrics(everything())
