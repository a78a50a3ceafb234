"""Cache policies by keys, values and queries: LagKV, Q-Filters and expected attention, each by hand in plain loops."""
from __future__ import annotations

import pytest

from playground.contract import find
from support.budget_policies import roomy
from support.eviction import LENGTH, alone, course, models

LagKV, QFilters, Expected = (find(name) for name in ("lag_kv", "q_filters", "expected_attention"))
COLLAPSES = {name: roomy(name, size=2048) for name in ("lag_kv", "q_filters", "expected_attention")}


@pytest.mark.strategy("lag_kv", "q_filters", "expected_attention")
@pytest.mark.parametrize("policy", [LagKV(sinks=2, lag=4, size=10), QFilters(size=10, recent=3),
                                    Expected(size=10, window=6)], ids=lambda policy: policy.name)
def test_a_run_holds_the_budget_and_heads_differ(policy):
    ids, held_after = course(alone(policy), models())
    assert len(ids) == LENGTH and all(len(head) == 10 for layer in held_after[-1] for head in layer)
    assert len({frozenset(head) for layer in held_after[-1] for head in layer}) > 1
