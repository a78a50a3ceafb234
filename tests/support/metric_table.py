"""Traces with known metrics, by what they show: one table for lane_metrics.py and for metrics.js of the page."""
from __future__ import annotations

from typing import Any

from playground.events import Branches, Cache, Done, Fill, Forward, Header, Mask, Rollback, Step
from playground.trace import Trace
from support.small_traces import END, ONE
from support.traces import commit, draft, greedy, prefill, speculative, stamp, trace, verdict

THINKER = [Header(vocabulary=100, thinking=[" 2", " 4"])]
FORCED = commit(1, [2, 3, 4], ["sampled", "forced", "forced"])
CANVAS = [Header(vocabulary=100, canvas=2)]
SMALL = Cache(length=9, layers=1, heads=2, live=[[[(0, 4)], [(0, 2), (5, 9)]]], bytes=600)
LATER = Cache(length=9, layers=1, heads=2, live=[[[(0, 1)], [(0, 5)]]], bytes=700)

TABLE: dict[str, tuple[Trace, dict[str, Any]]] = {
    "plain decoding gives exactly one token per forward, the first one from the prefill": (
        greedy(1, 2, 3, 4),
        {"tokens": 4, "target_forwards": 3, "tokens_per_target_forward": 1.0, "wasted_tokens": 0,
         "origins": {"sampled": 4}},
    ),
    "a forward that a stop left without a token is not counted against the lane": (
        trace(prefill(), ONE, Forward(), commit(1, [2]), Forward(), Done("stopped")),
        {"target_forwards": 2, "tokens_per_target_forward": 1.0},
    ),
    "a text of one token has no rate per forward": (greedy(1), {"tokens_per_target_forward": None}),
    "speculation counts the bonus and leaves out the prefill": (
        speculative(),
        {"tokens": 1 + 3 + 2, "tokens_per_target_forward": (3 + 2) / 2, "forwards": {"draft": 5, "target": 2},
         "draft_forwards": 5},
    ),
    "acceptance is accepted over tested; in round 1 both draft tokens are first ones": (
        speculative(),
        {"acceptance_rate": (2 + 1) / (3 + 2), "acceptance_by_position": [(1 + 1) / (1 + 2), 1 / 1, 0 / 1],
         "mean_accepted": (2 + 1) / 2},
    ),
    "a depth at which nothing was tested has no acceptance": (
        trace(draft(0, [5, 6]), verdict(0, [0, 1], 7, tests=[1]), commit(0, [5, 6, 7]), END),
        {"acceptance_by_position": [None, 1.0], "acceptance_rate": 1.0},
    ),
    "wasted rows are those the text did not need: one rejected draft token in each round": (
        speculative(), {"wasted_tokens": (4 + 3) - (6 - 1)},
    ),
    "tokens taken back were wasted and do not count": (
        trace(prefill(), ONE, Forward(), commit(1, [2], ["draft"]), Forward(), commit(2, [3]), Rollback(2, " 1"),
              Forward(), commit(1, [4]), END),
        {"tokens": 2, "origins": {"sampled": 2}, "wasted_tokens": 3 - 1, "tokens_per_target_forward": 1 / 3},
    ),
    "rows of dropped branches were wasted": (
        trace(prefill(), ONE, Branches([(1, 0)]), Forward(tokens=2), commit(1, [2]), commit(1, [3], sequence=1),
              Branches(dropped=[1]), END),
        {"wasted_tokens": 2 - 1, "tokens": 2},
    ),
    "forced tokens cost no forward of their own": (
        trace(prefill(), ONE, Forward(), FORCED, Forward(tokens=3), commit(4, [5]), END),
        {"tokens_per_target_forward": (3 + 1) / 2, "wasted_tokens": (1 + 3) - (5 - 1),
         "origins": {"sampled": 3, "forced": 2}},
    ),
    "a canvas wastes no rows of a text": (
        Trace(CANVAS, stamp(Forward(tokens=8), Fill([0], [1], [" 1"], [0.9]), commit(0, [1, 2]), END)),
        {"wasted_tokens": None, "tokens_per_target_forward": 2 / 1},
    ),
    "thinking is counted apart, its tags included": (
        Trace(THINKER, stamp(prefill(), ONE, commit(1, [2, 3, 3]), commit(4, [4, 5]), END)),
        {"tokens": 6, "thinking_tokens": 4, "answer_tokens": 2},
    ),
    "thinking that has not ended is thinking to the end of the text": (
        Trace(THINKER, stamp(prefill(), ONE, commit(1, [2, 3, 3]), Rollback(1, " 1 2 3"), END)),
        {"tokens": 3, "thinking_tokens": 2, "answer_tokens": 1},
    ),
    "a text without thinking counts none apart": (
        Trace(THINKER, stamp(prefill(), ONE, END)), {"thinking_tokens": None, "answer_tokens": None},
    ),
    "time is read from the lane's own clock": (
        trace(prefill(), ONE, Forward(), commit(1, [2]), END, at=[0.2, 0.25, 0.4, 0.45, 0.5]),
        {"seconds": 0.5, "time_to_first_token": 0.25, "tokens_per_second": 2 / 0.5},
    ),
    "entropy is the mean over the final tokens": (
        trace(Step(0, 1.0), ONE, Step(1, 9.0), commit(1, [2]), Rollback(1, " 1"), Step(1, 2.0), commit(1, [3]), END),
        {"mean_entropy": (1.0 + 2.0) / 2},
    ),
    "cache peaks are over layers, heads and time of the target": (
        trace(SMALL, LATER, Cache("draft", 50, 1, 1, [[[(0, 50)]]], bytes=9000), END),
        {"kv_live_peak": 2 + 4, "kv_bytes_peak": 700},
    ),
    "mask time is shared by all tokens": (
        trace(Mask(seconds=0.002), ONE, Mask(seconds=0.004), commit(1, [2]), END),
        {"mask_seconds_per_token": (0.002 + 0.004) / 2},
    ),
    "operations of all streams and of the prefill add up": (
        trace(prefill(flops=5.0), Forward("draft", flops=1.0), Forward(flops=2.0), END), {"flops": 5.0 + 1.0 + 2.0},
    ),
    "a metric without meaning is null": (
        trace(END, at=[0.0]),
        dict.fromkeys(("thinking_tokens", "answer_tokens", "tokens_per_second", "time_to_first_token",
                       "tokens_per_target_forward", "acceptance_rate", "acceptance_by_position", "mean_accepted",
                       "mean_entropy", "kv_live_peak", "kv_bytes_peak", "mask_seconds_per_token")),
    ),
}
