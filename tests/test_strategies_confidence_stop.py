"""Draft model with a confidence stop: what it accepts, by enumeration, and wrong variants against the same check."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
from registry import Collapse

from playground.contract import find, make
from support.assisted_rounds import first_rounds, rows_of
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.speculation import collapses, off, speculative_lane
from support.wrong_variants import refused

Stop = find("confidence_stop")
FIXED = {"threshold": 0.0, "schedule": "constant", "length": 4}
COLLAPSES = {
    "confidence_stop": [
        *collapses("confidence_stop", length=0),
        Collapse(speculative_lane("confidence_stop", "rejection", AT_ONE, **FIXED),
                 speculative_lane("draft_model", "rejection", AT_ONE, depth=4)),
    ],
}


def stopped(models: dict, tokens: list[int], threshold: float, rule: str, depth: int) -> bool:
    """Whether a draft may end after these tokens, with more than one token to decide about."""
    q = rows_of(models["draft"])
    if len(tokens) == depth:
        return True
    if rule == "llama.cpp":
        return max(q(tuple(tokens))) < threshold
    return bool(tokens) and q(tuple(tokens[:-1]))[tokens[-1]] < threshold


def check_stop(cls: type) -> None:
    for seed, (rule, threshold) in enumerate([("transformers", 0.4), ("llama.cpp", 0.5), ("transformers", 0.2)]):
        models = tables("abc", seed=seed)
        for _, tree, _ in first_rounds(models, 5, drafter=cls(rule=rule, threshold=threshold, length=3)):
            ends = [stopped(models, tree.tokens[:i], threshold, rule, 3) for i in range(len(tree) + 1)]
            assert ends == [False] * len(tree) + [True], (rule, tree.tokens)


class StopsAtTheMaximumOfTheRow(Stop):
    """Wrong for the library's rule: the drawn token's own probability counts."""

    def _level(self, lm, tree, rows, leaf):
        self.rule = "llama.cpp"
        return super()._level(lm, tree, rows, leaf)


class StopsWhereItIsSure(Stop):
    def __post_init__(self):
        super().__post_init__()
        self.threshold = 1 - self.threshold


@pytest.mark.oracle("confidence_stop")
def test_a_draft_ends_where_the_rule_says_and_nowhere_else():
    check_stop(Stop)


@pytest.mark.refuses("confidence_stop")
@pytest.mark.parametrize("wrong", [StopsAtTheMaximumOfTheRow, StopsWhereItIsSure])
def test_a_wrong_stop_is_refused(wrong):
    refused(check_stop, wrong)


class DropsUnlikelyTokens(Stop):
    """Wrong: a drawn token is not sent to the target because of its probability."""

    def _level(self, lm, tree, rows, leaf):
        added = super()._level(lm, tree, rows, leaf)
        if not added and len(tree):
            for listed in (tree.tokens, tree.parents, tree.q, tree.confidence, tree.order):
                listed.pop()
        return added


@pytest.mark.slow
@pytest.mark.refuses("confidence_stop")
def test_dropping_an_unlikely_draft_token_would_change_the_distribution():
    knobs = {"threshold": 0.4, "length": 2}
    assert off(Stop(**knobs), make("rejection"), "abc", 3) < EXACT
    assert off(DropsUnlikelyTokens(**knobs), make("rejection"), "abc", 3) > WRONG


def test_the_length_follows_the_librarys_schedule():
    drafter, lengths = make("confidence_stop", length=2), []
    for kept, drafted in ((2, 2), (1, 4), (4, 4), (0, 6), (0, 4), (0, 0)):
        drafter.observe(range(drafted), None, SimpleNamespace(kept=[*range(kept)]))
        lengths.append(drafter._allowed)
    assert lengths == [4, 3, 5, 4, 3, 3]
    constant = make("confidence_stop", length=2, schedule="constant")
    constant.observe(range(2), None, SimpleNamespace(kept=[0, 1]))
    assert constant._allowed == 2
