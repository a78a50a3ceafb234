"""Score, chunks and head budgets: what it keeps, by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch

from playground.contract import Held, find
from support.budget_policies import roomy
from support.window_votes import CUT, EARLY, HEADS, KEYS, LATE, SLOTS, WINDOW, competing, equals
from support.wrong_variants import refused

ComposedKV = find("composed_kv")
COLLAPSES = {
    "composed_kv": [
        *roomy("composed_kv", capacity=2048),
        *equals("composed_kv", {"score": "attention", "chunk": 1}, "ada_kv", {**CUT, "alpha": 0.3, "kernel": 3}),
        *equals("composed_kv", {"score": "attention", "alpha": 1.0}, "chunk_kv", {**CUT, "chunk": 4, "kernel": 3}),
        *equals("composed_kv", {"score": "attention", "alpha": 1.0, "chunk": 1}, "snapkv", {**CUT, "kernel": 5}),
    ],
}


def worth(score: str, head: int) -> dict[int, float]:
    """Of each token before the window, from the keys of its head, by the definitions."""
    rows = KEYS[head].tolist()
    length = [sum(x * x for x in row) ** 0.5 for row in rows]
    if score == "key_norm":
        return {p: -length[p] for p in EARLY}
    mean = [sum(row[i] / length[p] for p, row in enumerate(rows)) for i in range(4)]
    size = sum(x * x for x in mean) ** 0.5
    return {p: -sum(a * b for a, b in zip(rows[p], mean)) / (length[p] * size) for p in EARLY}


def composed(score: str, chunk: int, even: int, alpha: float) -> list[set[int]]:
    chunks = [[p for p in EARLY if p // chunk == n] for n in range(SLOTS)]
    heads = []
    for head in range(HEADS):
        values = worth(score, head)
        heads.append({n: sum(values[p] for p in own) / len(own) for n, own in enumerate(chunks) if own})
    return [{p for n in kept for p in chunks[n]} for kept in competing(heads, even // chunk, alpha)]


def check_composed(cls: type) -> None:
    held = Held(0, 2, "prefill", SLOTS, SLOTS, torch.arange(SLOTS)[None], read=lambda part: KEYS)
    sizes = set()
    for score in ("key_diff", "key_norm"):
        for chunk, alpha in ((1, 0.3), (4, 0.0), (4, 0.5), (3, 1.0)):
            policy = cls(score=score, window=WINDOW, capacity=WINDOW + 8, chunk=chunk, alpha=alpha)
            kept = [{p for p in range(SLOTS) if row[p]} for row in policy.retain(held).expand(HEADS, -1).tolist()]
            assert kept == [LATE | head for head in composed(score, chunk, 8, alpha)]
            sizes.add(tuple(map(len, kept)))
    assert any(len(set(own)) > 1 for own in sizes), "heads keep different numbers"


class KeepsTheMostAlike(ComposedKV):
    """Wrong: keys that resemble the mean stay."""

    def _scores(self, held, late):
        return -super()._scores(held, late)


class ScoresTokensAlone(ComposedKV):
    """Wrong: chunks are ignored."""

    def retain(self, held):
        self.chunk = 1
        return super().retain(held)


class BudgetsApart(ComposedKV):
    """Wrong: every head keeps the same number."""

    def retain(self, held):
        self.alpha = 1.0
        return super().retain(held)


@pytest.mark.oracle("composed_kv")
def test_the_chunks_with_the_most_unusual_keys_stay_under_a_budget_that_heads_share():
    check_composed(ComposedKV)


@pytest.mark.refuses("composed_kv")
@pytest.mark.parametrize("wrong", [KeepsTheMostAlike, ScoresTokensAlone, BudgetsApart])
def test_other_scores_chunks_and_budgets_are_refused(wrong):
    refused(check_composed, wrong)
