"""Rejection sampling against the law of its texts by hand, and wrong variants against the same check."""
from __future__ import annotations

import pytest

from playground.algorithms.speculative.verification import Ruling, reject, walk
from playground.contract import find, make
from playground.engine.sampling import residual_distribution
from support.speculation_oracles import CHAIN, NAMES, SIBLINGS, assert_refused, check_law


class RedrawsFromTarget(find("rejection")):
    """A rejected token is resampled from p, not from the residual max(p - q, 0)."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            p, position = rows.distribution(node), rows.position(node)
            return reject(p, children, tree, lambda ratio: lm.flip(ratio, position),
                          lambda rest: lm.draw(p, position, "redraw"))

        return walk(lm, tree, rows, rule)


class SwapsTheRatio(find("rejection")):
    """Accepts with min(1, q / p)."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            p, position, (child, *_) = rows.distribution(node), rows.position(node), children
            q, token = tree.q[child], tree.tokens[child]
            if lm.flip(min(1.0, float(q[token] / p[token])), position)[0]:
                return Ruling(child)
            return Ruling(None, lm.draw(residual_distribution(p, q), position, "redraw"))

        return walk(lm, tree, rows, rule)


class ComparesEverySiblingWithTheTarget(find("rejection")):
    """Tests the second sibling against p in place of the residual that the first rejection left."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            p, position, rest = rows.distribution(node), rows.position(node), rows.distribution(node)
            for child in children:
                token, q = tree.tokens[child], tree.q[child]
                if lm.flip(min(1.0, float(p[token] / q[token])), position)[0]:
                    return Ruling(child)
                rest = residual_distribution(rest, q)
            return Ruling(None, lm.draw(rest, position, "redraw"))

        return walk(lm, tree, rows, rule)


@pytest.mark.oracle("rejection")
@pytest.mark.parametrize("drafter", [CHAIN, SIBLINGS, make("rsd_c", branching="2")],
                         ids=["chain", "independent siblings", "distinct siblings"])
def test_rejection_keeps_the_targets_distribution(drafter):
    check_law(make("rejection"), drafter)


@pytest.mark.refuses("rejection")
@pytest.mark.parametrize("wrong", [RedrawsFromTarget, SwapsTheRatio, ComparesEverySiblingWithTheTarget], ids=NAMES)
def test_a_wrong_rejection_rule_has_another_distribution(wrong):
    assert_refused(check_law, wrong(), SIBLINGS)
