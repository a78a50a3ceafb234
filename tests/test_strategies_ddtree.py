"""DDTree: the most probable paths of a block drafter's marginals, by brute force."""
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from playground.algorithms.draft_heads.blocks.marginal_trees import Marginals, grow_best_prefixes, grow_fans
from playground.algorithms.draft_heads.scored_tree import ScoredTree
from playground.contract import find
from playground.contract.token_tree import ROOT, TokenTree
from support.block_trees import differing, most_probable_prefixes
from support.draft_heads import head, is_greedy, random_weights, written
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane

NAME, NODES, DEPTH = "ddtree", 12, 3
BRIEF = {"ddtree": {"weights": "random", "nodes": 5, "depth": 2}}
COLLAPSES = {"ddtree": collapses("ddtree", weights="random", nodes=0)}


def drafter(cls=None, **knobs):
    return head(NAME, random_weights("dflash"), cls, **{"nodes": NODES, "depth": DEPTH, **knobs})


def expected(found):
    return most_probable_prefixes(found, NODES)


@pytest.mark.oracle("ddtree")
def test_the_tree_has_the_most_probable_paths_of_all():
    assert not differing(drafter(), expected, DEPTH)


class WithoutThePath(find("ddtree")):
    """Wrong: a node is as probable as its own token."""

    def grow(self, growing, marginals):
        grow_best_prefixes(Forgetful(growing.lm, growing.tree, growing.scores), marginals, self.nodes)


class Forgetful(ScoredTree):
    def add_one(self, parent, token, logp):
        self.scores.append(0.0)
        return self.tree.add(token, parent)


class Fans(find("ddtree")):
    """Wrong: all children of a node at once."""

    def grow(self, growing, marginals):
        grow_fans(growing, marginals, self.nodes, 4)


class OneDepthLate(find("ddtree")):
    """Wrong: the guess for the anchor itself is taken for that after it."""

    def draft(self, lm, hidden, rows, tree):
        return super().draft(lm, hidden, range(rows.start - 1, rows.stop - 1), tree)


@pytest.mark.refuses("ddtree")
@pytest.mark.parametrize("wrong", [WithoutThePath, Fans, OneDepthLate])
def test_other_trees_and_rows_are_detected(wrong):
    assert differing(drafter(wrong), expected, DEPTH)


def grown(logp: torch.Tensor, nodes: int, ends: frozenset = frozenset()) -> TokenTree:
    """The tree of marginals [depths, vocabulary], whose tokens `ends` end a text."""
    growing = ScoredTree(SimpleNamespace(ends=ends.__contains__), TokenTree())
    grow_best_prefixes(growing, Marginals.of(logp, nodes, lambda tokens: tokens), nodes)
    return growing.tree


@pytest.mark.oracle("ddtree")
@pytest.mark.parametrize("seed", range(20))
def test_every_size_of_tree_is_the_best_of_that_size(seed):
    logp = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(-1)
    ranked = [sorted(((value, token) for token, value in enumerate(row)), reverse=True) for row in logp.tolist()]
    for nodes in (1, 2, 5, 17, 60):
        tree = grown(logp, nodes)
        assert {tuple(tree.prefix(node)) for node in range(len(tree))} == most_probable_prefixes(ranked, nodes)


def test_a_chain_where_one_token_of_each_depth_is_almost_certain():
    assert grown(torch.eye(5) * 50, 5).parents == [ROOT, 0, 1, 2, 3]


def test_nothing_follows_the_end_of_the_text():
    tree = grown(torch.eye(5) * 50, 9, frozenset({1}))
    assert all(tree.tokens[parent] != 1 for parent in tree.parents if parent != ROOT) and 1 in tree.tokens


@pytest.mark.strategy("ddtree")
def test_the_text_is_the_targets():
    assert is_greedy(written(drafter()))


@pytest.mark.strategy("ddtree")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=5, depth=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
