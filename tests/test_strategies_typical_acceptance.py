"""Typical acceptance: what it accepts, by enumeration, and wrong variants against the same check."""
from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch
from tables import distance, law

from playground.contract import Verifier, find, make
from playground.contract.lane_config import assemble
from support.assisted_rounds import lane_of, rows_of
from support.laws import AT_ONE, EXACT, tables
from support.speculation import first_drafts, speculative_lane
from support.wrong_variants import refused

Typical = find("typical_acceptance")


def typical_law(models: dict, epsilon: float, delta: float) -> dict[tuple[int, int], float]:
    """Two tokens, with one draft token: it and the target's next token, or two tokens of the target."""
    p, q, found = rows_of(models["target"]), rows_of(models["draft"]), defaultdict(float)
    root = p(())
    threshold = min(epsilon, delta * math.exp(sum(x * math.log(x) for x in root)))
    refused = sum(chance for token, chance in enumerate(q(())) if root[token] <= threshold)
    for a, b in itertools.product(range(3), repeat=2):
        accepted = q(())[a] if root[a] > threshold else 0.0
        found[a, b] = (accepted + refused * root[a]) * p((a,))[b]
    return found


def check_typical(cls: type[Verifier]) -> None:
    for seed, (epsilon, delta) in enumerate([(0.3, 0.9), (0.9, 0.6), (0.25, 0.99), (0.5, 0.0)]):
        models = tables("abc", seed=seed * 2)
        found = law(lane_of(make("draft_model", depth=1), cls(epsilon=epsilon, delta=delta)), models, [0], 2)
        assert distance(found, typical_law(models, epsilon, delta)) < EXACT


class LargerThreshold(Typical):
    def threshold(self, p):
        return max(self.epsilon, self.delta * math.exp(-float(torch.special.entr(p).sum())))


class ConfidentRowsAcceptMore(Typical):
    def threshold(self, p):
        return min(self.epsilon, self.delta * (1 - math.exp(-float(torch.special.entr(p).sum()))))


@pytest.mark.oracle("typical_acceptance")
def test_typical_acceptance_has_the_law_of_its_threshold():
    check_typical(Typical)


@pytest.mark.refuses("typical_acceptance")
@pytest.mark.parametrize("wrong", [LargerThreshold, ConfidentRowsAcceptMore])
def test_a_wrong_threshold_is_refused(wrong):
    refused(check_typical, wrong)


@pytest.mark.slow
@pytest.mark.strategy("typical_acceptance")
def test_of_several_branches_the_longest_accepted_one_is_followed():
    models, seen = tables("abc", seed=2), 0
    p = rows_of(models["target"])
    lane = speculative_lane("spectr", "typical_acceptance", AT_ONE, rows=2, length=2)
    verifier = make("typical_acceptance")
    for _, tree, verdict in first_drafts(lane, models, 4):
        accepted = [
            path for path in ([*tree.path(node)] for node in range(len(tree)))
            if all(p(tuple(tree.prefix(tree.parents[n])))[tree.tokens[n]]
                   > verifier.threshold(torch.tensor(p(tuple(tree.prefix(tree.parents[n]))))) for n in path)
        ]
        assert len(verdict.kept) == max(map(len, accepted), default=0)
        assert not verdict.kept or verdict.kept in accepted
        seen += len(verdict.kept) == 2
    assert seen


def test_a_lane_with_typical_acceptance_does_not_claim_the_targets_distribution():
    def guarantee(verifier):
        return assemble(speculative_lane("draft_model", verifier, AT_ONE)).guarantee()

    assert "distribution_identical" not in guarantee("typical_acceptance")
    assert "distribution_identical" in guarantee("rejection") and "distribution_identical" in guarantee(
        "block_verification"
    )
