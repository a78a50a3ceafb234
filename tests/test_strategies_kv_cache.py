"""Cache policies: which positions they leave."""
from __future__ import annotations

import torch
from registry import Collapse, lanes

from playground.strategy import make

COLLAPSES = {
    "sink_window": [Collapse(lane, plain) for lane, plain in zip(lanes(added=(("sink_window", {"window": 1024}),)), lanes())],
}


def seen(policy, query: int) -> list[int]:
    return policy.visible(torch.tensor([[query]]), torch.arange(query + 1))[0].nonzero().flatten().tolist()


def test_a_window_of_three_and_two_sinks_leaves_the_first_two_and_the_last_three():
    assert seen(make("sink_window", sinks=2, window=3), 9) == [0, 1, 7, 8, 9]


def test_sinks_and_window_may_overlap_while_the_text_is_short():
    assert seen(make("sink_window", sinks=2, window=3), 3) == [0, 1, 2, 3]


def test_a_window_of_one_sees_only_the_row_itself():
    assert seen(make("sink_window", sinks=0, window=1), 5) == [5]
