"""Budgets by head (AdaKV): what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest

from playground.contract import find, make
from support.budget_policies import roomy
from support.window_votes import CUT, HEADS, LATE, WINDOW, competing, equals, stays, votes
from support.wrong_variants import refused

AdaKV = find("ada_kv")
COLLAPSES = {"ada_kv": [*roomy("ada_kv", capacity=2048), *equals("ada_kv", {"alpha": 1.0}, "snapkv", CUT)]}


def check_ada(cls: type) -> None:
    for seed in range(6):
        for alpha in (0.0, 0.3, 0.7, 1.0):
            policy = cls(window=WINDOW, capacity=WINDOW + 6, kernel=1, alpha=alpha)
            assert stays(policy, seed) == [LATE | head for head in competing(votes(seed), 6, alpha)]


class EvenBudgets(AdaKV):
    def __post_init__(self):
        super().__post_init__()
        self.alpha = 1.0


class NoSafeguard(AdaKV):
    def __post_init__(self):
        super().__post_init__()
        self.alpha = 0.0


@pytest.mark.oracle("ada_kv")
def test_heads_compete_for_what_is_left_of_the_budget():
    check_ada(AdaKV)


@pytest.mark.refuses("ada_kv")
@pytest.mark.parametrize("wrong", [EvenBudgets, NoSafeguard])
def test_a_wrong_share_is_refused(wrong):
    refused(check_ada, wrong)


def test_the_scattered_head_keeps_more_and_the_layer_keeps_as_much_as_snapkv():
    kept = stays(make("ada_kv", window=WINDOW, capacity=WINDOW + 6, kernel=1), 0)
    assert len(kept[0]) != len(kept[2]) and sum(map(len, kept)) == HEADS * (WINDOW + 6)
