"""Draft model against the law of its trees, and wrong variants against the same check."""
from __future__ import annotations

from itertools import product

import pytest
import torch
from tables import distance, product_law

from playground.algorithms.speculative.drafting import independent, new_tree
from playground.contract import Drafter, find
from playground.contract.token_tree import ROOT
from support.first_trees import chain_of, first_trees, law_of_first_trees, siblings_of
from support.speculation_oracles import AT_ONE, EXACT, NAMES, argmax, assert_refused, tables


def check_draft_model(drafter: type[Drafter]) -> None:
    """Chains have the draft's distribution and every q is the row of its token; greedily they are its argmaxes."""
    models = tables()
    draft = models["draft"]
    assert distance(law_of_first_trees(drafter(depth=2), models, 3, chain_of), product_law(draft, [0], 2)) < EXACT
    p = draft.scores((0,)).softmax(-1).tolist()
    pairs = law_of_first_trees(drafter(depth=1, width=2), models, 3, siblings_of)
    assert distance(pairs, {(a, b): p[a] * p[b] for a, b in product(range(3), repeat=2)}) < EXACT
    for _, tree in first_trees(drafter(depth=2), models, 3, AT_ONE):
        rows = [draft.scores((0, *tree.prefix(parent))).softmax(-1) for parent in tree.parents]
        assert all(torch.allclose(q, row) for q, row in zip(tree.q, rows, strict=True))
    ((_, tree),) = first_trees(drafter(depth=3), models, 4)
    assert tree.tokens == [argmax(draft, [0, *tree.tokens[:i]]) for i in range(3)]


class DrawsEveryTokenFromOneRow(find("draft_model")):
    """The second token does not depend on the first."""

    def propose(self, lm, budget):
        tree = new_tree(lm, self)
        rows = yield lm.stream("draft").extend()
        for _ in range(min(self.depth, budget)):
            independent(lm, tree, rows, ROOT, 1)
        tree.parents = list(range(ROOT, len(tree) - 1))
        return tree


class TellsASofterRow(find("draft_model")):
    """q is not the distribution the token was sampled from."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        tree.q = [q if q is None else (q.log() / 2).softmax(-1) for q in tree.q]
        return tree


@pytest.mark.oracle("draft_model")
def test_chains_and_siblings_have_the_draft_models_distribution():
    check_draft_model(find("draft_model"))


@pytest.mark.refuses("draft_model")
@pytest.mark.parametrize("wrong", [DrawsEveryTokenFromOneRow, TellsASofterRow], ids=NAMES)
def test_a_wrong_draft_chain_is_detected(wrong):
    assert_refused(check_draft_model, wrong)
