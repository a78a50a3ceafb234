"""RSD-S: a stochastic beam against the law of its trees, and wrong variants against the same check."""
from __future__ import annotations

import pytest
from tables import distance, product_law

from playground.contract import Drafter, find
from playground.contract.token_tree import TokenTree
from support.first_trees import law_of_first_trees, without_replacement
from support.speculation_oracles import EXACT, NAMES, assert_refused, tables


def check_rsd_s(drafter: type[Drafter]) -> None:
    """A beam of two continuations of two tokens is sampled without replacement among all four."""
    models = tables("ab")

    def leaves(tree: TokenTree) -> tuple:
        return tuple(tuple(tree.prefix(node)) for node in range(len(tree)) if len(tree.path(node)) == 2)

    found = law_of_first_trees(drafter(width=2, depth=2), models, 3, leaves)
    assert distance(found, without_replacement(product_law(models["draft"], [0], 2), 2)) < EXACT


class ForgetsWhatWasTaken(find("rsd_s")):
    """A branch keeps its weight after a child was sampled from it."""

    def _weights(self, branches, begun, alive):
        weights = [branch.mass * (branch.remaining.left > 0) for branch in branches[:begun]]
        return weights + super()._weights(branches, begun, alive)[begun:]


class FollowsEveryBranchAlike(find("rsd_s")):
    """Gives each path one child in turn, regardless of its probability."""

    def _weights(self, branches, begun, alive):
        return [1.0 * (index == begun) for index in range(min(begun + 1, len(branches)))]


@pytest.mark.oracle("rsd_s")
def test_the_beam_of_rsd_s_is_sampled_without_replacement_among_continuations():
    check_rsd_s(find("rsd_s"))


@pytest.mark.refuses("rsd_s")
@pytest.mark.parametrize("wrong", [ForgetsWhatWasTaken, FollowsEveryBranchAlike], ids=NAMES)
def test_a_wrong_stochastic_beam_has_another_distribution(wrong):
    assert_refused(check_rsd_s, wrong)
