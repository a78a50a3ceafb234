"""Block verification: what it accepts, by enumeration, and wrong variants against the same check."""
from __future__ import annotations

import itertools
import math

import pytest
from tables import distance, law, product_law

from playground.contract import Verifier, find, make
from playground.engine.sampling import residual_distribution
from support.assisted_rounds import first_rounds, lane_of, rows_of
from support.laws import EXACT, tables
from support.wrong_variants import refused

Block = find("block_verification")


def worths(models: dict, block: tuple[int, ...]) -> list[float]:
    p, q, found = rows_of(models["target"]), rows_of(models["draft"]), [1.0]
    for i, token in enumerate(block):
        found.append(min(1.0, found[-1] * p(block[:i])[token] / q(block[:i])[token]))
    return found


def check_block(cls: type[Verifier]) -> None:
    """The law is the target's, and the i-th token is accepted with probability w_i, averaged over the drafts."""
    for seed in (1, 2, 3):
        models = tables("abc", seed=2 * seed)
        found = law(lane_of(make("draft_model", depth=2), cls()), models, [0], 3)
        assert distance(found, product_law(models["target"], [0], 3)) < EXACT
    for seed in range(2):
        models, depth, found = tables("abc", seed=2 * seed), 3, 0.0
        for weight, _, verdict in first_rounds(models, depth + 1, verifier=cls()):
            found += weight * len(verdict.kept)
        q, expected = rows_of(models["draft"]), 0.0
        for block in itertools.product(range(3), repeat=depth):
            drawn = math.prod(q(block[:i])[token] for i, token in enumerate(block))
            expected += drawn * sum(worths(models, block)[1:])
        assert found == pytest.approx(expected)


class TokenByToken(Block):
    """Wrong: each token is worth its own ratio, whatever came before it."""

    def worth(self, block):
        return [1.0, *(min(1.0, float(p[t] / q[t])) for t, p, q in zip(block.tokens, block.p, block.q))]


class ResidualWithoutTheWorth(Block):
    def residual(self, block, worth, i):
        return residual_distribution(block.p[i], block.q[i])


class WorthMayExceedOne(Block):
    def worth(self, block):
        found = [1.0]
        for t, p, q in zip(block.tokens, block.p, block.q):
            found.append(found[-1] * float(p[t] / q[t]))
        return [min(1.0, worth) for worth in found]


class OneTokenAfterTheOther(Block):
    """Exact, but rejection sampling: the blocks it accepts are shorter."""

    def judge(self, lm, tree, rows):
        return make("rejection").judge(lm, tree, rows)


@pytest.mark.slow
@pytest.mark.oracle("block_verification")
def test_a_block_is_exact_and_accepted_as_far_as_its_worth_allows():
    check_block(Block)


@pytest.mark.slow
@pytest.mark.refuses("block_verification")
@pytest.mark.parametrize("wrong", [TokenByToken, ResidualWithoutTheWorth, WorthMayExceedOne, OneTokenAfterTheOther])
def test_a_wrong_block_is_refused(wrong):
    refused(check_block, wrong)
