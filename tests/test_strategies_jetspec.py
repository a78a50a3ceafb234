"""JetSpec: fans after the most probable paths of a block drafter's marginals, by a search over lists."""
from __future__ import annotations

import pytest

from playground.algorithms.draft_heads.blocks.marginal_trees import grow_best_prefixes, grow_fans
from playground.contract import find
from support.block_trees import differing, fans
from support.draft_heads import head, is_greedy, random_weights, written
from support.laws import AT_ONE, EXACT, off, tables
from support.speculation import collapses, speculative_lane
from support.speculative_runs import recorded

NAME, NODES, DEPTH, WIDTH = "jetspec", 14, 3, 3
BRIEF = {"jetspec": {"weights": "random", "nodes": 5, "depth": 2, "width": 2}}
COLLAPSES = {"jetspec": collapses("jetspec", weights="random", nodes=0)}


def drafter(cls=None, **knobs):
    return head(NAME, random_weights("dflash"), cls, **{"nodes": NODES, "depth": DEPTH, "width": WIDTH, **knobs})


def expected(found):
    return fans(found, NODES, WIDTH)


@pytest.mark.oracle("jetspec")
def test_the_most_probable_path_gets_all_its_children_until_the_tree_is_full():
    assert not differing(drafter(), expected, DEPTH)


@pytest.mark.oracle("jetspec")
def test_with_the_causal_mask_a_row_is_the_last_of_a_shorter_block():
    made = drafter()
    made.network.see_before_only()
    assert not differing(made, expected, DEPTH, causal=True)


def test_the_mask_is_put_on_where_the_knob_says_so():
    lanes = [speculative_lane(NAME, "greedy_match", weights="random", causal=causal) for causal in (False, True)]
    drafts = [
        [event.tokens for event in recorded(lane, length=6)[1] if event.kind == "draft"]
        for lane in lanes
    ]
    assert drafts[0] != drafts[1] and drafts[0][0] and drafts[1][0]


class OneByOne(find("jetspec")):
    """Wrong: the tree of DDTree."""

    def grow(self, growing, marginals):
        grow_best_prefixes(growing, marginals, self.nodes)


class OneChildLess(find("jetspec")):
    """Wrong: narrower fans."""

    def grow(self, growing, marginals):
        grow_fans(growing, marginals, self.nodes, self.width - 1)


class Causal(find("jetspec")):
    """Wrong, where the knob does not say so: rows do not see those after them."""

    def grow(self, growing, marginals):
        self.network.see_before_only()
        super().grow(growing, marginals)


@pytest.mark.refuses("jetspec")
@pytest.mark.parametrize("wrong", [OneByOne, OneChildLess, Causal])
def test_other_trees_and_masks_are_detected(wrong):
    assert differing(drafter(wrong), expected, DEPTH)


@pytest.mark.refuses("jetspec")
def test_rows_that_see_those_after_them_are_not_causal():
    assert differing(drafter(), expected, DEPTH, causal=True)


@pytest.mark.strategy("jetspec")
@pytest.mark.parametrize("width", [1, 3])
def test_the_text_is_the_targets(width):
    assert is_greedy(written(drafter(width=width)))


@pytest.mark.strategy("jetspec")
@pytest.mark.parametrize("verifier", ["rejection", "sample_match"])
def test_the_distribution_is_the_targets(verifier):
    lane = speculative_lane(NAME, verifier, AT_ONE, weights="random", nodes=5, depth=2, width=2)
    assert off(lane, tables("abc"), [0, 1, 0], 3) < EXACT
