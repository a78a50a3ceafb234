"""SpecTr: independent drafts against the law of its trees, and wrong variants against the same check."""
from __future__ import annotations

from itertools import product

import pytest
from tables import distance, product_law

from playground.contract import Drafter, find
from playground.contract.token_tree import TokenTree
from support.first_trees import law_of_first_trees
from support.speculation_oracles import EXACT, assert_refused, tables


def check_spectr(drafter: type[Drafter]) -> None:
    """Two rows of two tokens are two independent continuations; `order` names the node of each row, level by level."""
    models = tables("ab")

    def continuations(tree: TokenTree) -> tuple:
        return tuple(tuple(tree.prefix(node)) for node in tree.order[2:])

    one = product_law(models["draft"], [0], 2)
    found = law_of_first_trees(drafter(rows=2, length=2), models, 3, continuations)
    assert distance(found, {(a, b): one[a] * one[b] for a, b in product(one, repeat=2)}) < EXACT


class ForgetsRepeats(find("spectr")):
    """Loses how often a node was sampled."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        tree.order = list(dict.fromkeys(tree.order))
        return tree


@pytest.mark.oracle("spectr")
def test_rows_of_spectr_are_independent_continuations():
    check_spectr(find("spectr"))


@pytest.mark.refuses("spectr")
def test_dropping_repeated_rows_has_another_distribution():
    assert_refused(check_spectr, ForgetsRepeats)
