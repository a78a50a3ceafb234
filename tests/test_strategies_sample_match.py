"""Sample and match against the law of its texts by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest

from playground.algorithms.speculative.verification import Ruling, match, walk
from playground.contract import find, make
from support.speculation_oracles import CHAIN, NAMES, SIBLINGS, assert_refused, check_law


class DrawsAgainAfterAMiss(find("sample_match")):
    """Discards the sampled token if no child proposed it, and samples another."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            ruling = match(lm.pick(rows, node).token, children, tree, rows.distribution(node))
            return ruling if ruling.child is not None else Ruling(None, lm.pick(rows, node, "again").token)

        return walk(lm, tree, rows, rule)


class MatchesTheMostProbable(find("sample_match")):
    """Takes the most probable token although tokens are sampled."""

    def judge(self, lm, tree, rows):
        return walk(
            lm, tree, rows, lambda node, children: match(rows.best(node), children, tree, rows.distribution(node))
        )


@pytest.mark.oracle("sample_match")
@pytest.mark.parametrize("drafter", [CHAIN, SIBLINGS], ids=["chain", "siblings"])
def test_sample_and_match_keeps_the_targets_distribution(drafter):
    check_law(make("sample_match"), drafter)


@pytest.mark.refuses("sample_match")
@pytest.mark.parametrize("wrong", [DrawsAgainAfterAMiss, MatchesTheMostProbable], ids=NAMES)
def test_a_wrong_match_has_another_distribution(wrong):
    assert_refused(check_law, wrong(), CHAIN)
