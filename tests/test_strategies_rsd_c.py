"""RSD-C: distinct siblings against the law of its trees, and wrong variants against the same check."""
from __future__ import annotations

import pytest
from tables import distance, product_law

from playground.algorithms.speculative.drafting import independent_level
from playground.contract import Drafter, find
from support.first_trees import chain_of, law_of_first_trees, siblings_of, without_replacement
from support.speculation_oracles import EXACT, assert_refused, tables


def check_rsd_c(drafter: type[Drafter]) -> None:
    """The siblings of the first level, and those below the first of them."""
    models = tables()
    expected = without_replacement(product_law(models["draft"], [0], 1), 2)
    found = law_of_first_trees(drafter(branching="2"), models, 3, siblings_of)
    assert distance(found, {(a, b): chance for ((a,), (b,)), chance in expected.items()}) < EXACT
    below = law_of_first_trees(drafter(branching="1 2"), models, 3, chain_of)
    first = models["draft"].scores((0,)).softmax(-1).tolist()
    pairs = {a: without_replacement(product_law(models["draft"], [0, a], 1), 2) for a in range(3)}
    both = {(a, b, c): first[a] * chance for a in range(3) for ((b,), (c,)), chance in pairs[a].items()}
    assert distance(below, both) < EXACT


class DrawsWithReplacement(find("rsd_c")):
    """Siblings may repeat."""

    def _children(self, lm, tree, rows, leaves, width):
        return independent_level(lm, tree, rows, leaves, width)


@pytest.mark.slow
@pytest.mark.oracle("rsd_c")
def test_siblings_of_rsd_c_are_sampled_without_replacement():
    check_rsd_c(find("rsd_c"))


@pytest.mark.refuses("rsd_c")
def test_siblings_sampled_with_replacement_have_another_distribution():
    assert_refused(check_rsd_c, DrawsWithReplacement)
