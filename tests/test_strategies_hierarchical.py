"""Hierarchical speculation: its draft tokens and its text, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from tables import write

from playground.algorithms.speculative.successor_tree import LikelySuccessors, TreeShape
from playground.contract import Verifier, find, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.rng import Draws
from playground.events import Forward
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.parallel_drafting import agreeing
from support.speculation import collapses, speculative_lane
from support.speculative_runs import CHAIN, law_distance, of, recorded, with_drafter

COLLAPSES = {
    "hierarchical": [
        *collapses("hierarchical", least=0),
        Collapse(speculative_lane("hierarchical", "rejection", AT_ONE, least=3, ahead=0), CHAIN),
        Collapse(speculative_lane("hierarchical", "rejection", AT_ONE, least=3, inner_draft="tree", nodes=0), CHAIN),
    ],
}


def chains_of(config: LaneConfig, models: dict, prompt: list[int]) -> list[list[int]]:
    """The draft tokens to verify, round by round."""
    seen = []

    class Watched(Verifier):
        def judge(self, lm, tree, rows):
            seen.append(tree.tokens)
            return make("sample_match").judge(lm, tree, rows)

    assembly = assemble(config)
    assembly.decoder.verifier = Watched()
    write(assembly, models, prompt, Limits(0, 40), Draws(4))
    return seen


@pytest.mark.parametrize("inner", ["lookup", "tree"])
@pytest.mark.parametrize("samplers", [(), (AT_ONE,)], ids=["greedy", "drawn"])
def test_draft_tokens_with_an_inner_draft_equal_the_draft_models_own(samplers, inner):
    """A chain is sampled from the same distributions, however the draft model's forwards are saved."""
    models, prompt = tables("ab", seed=2), [0, 1, 0, 1, 1]
    first = {}
    own = {"least": 6, "ahead": 4, "inner_draft": inner, "levels": 4}
    for name, knobs in (("hierarchical", own), ("draft_model", {"depth": 12})):
        first[name] = chains_of(speculative_lane(name, "sample_match", *samplers, **knobs), models, prompt)[0]
    assert (
        6 <= len(first["hierarchical"]) <= 10
        and first["hierarchical"] == first["draft_model"][: len(first["hierarchical"])]
    )


def test_the_target_gets_at_least_as_many_tokens_as_requested_and_at_most_one_inner_draft_more():
    lengths = [
        len(chain)
        for chain in chains_of(
            speculative_lane("hierarchical", "sample_match", least=5, ahead=3), tables("ab", seed=2), [0, 1, 0, 1, 1]
        )
    ]
    assert len(lengths) > 4 and all(5 <= length <= 8 for length in lengths[:-4]) and max(lengths) > 5


def test_on_repeating_text_the_draft_model_takes_few_forwards():
    models = agreeing(1000)
    (_, alone), (_, helped) = (
        recorded(speculative_lane("hierarchical", least=6, ahead=ahead), Models(**models), 48, "abcabcabc")
        for ahead in (0, 5)
    )
    passes = [sum(event.stream == "draft" for event in of(Forward, events)) for events in (alone, helped)]
    assert passes[1] <= passes[0] / 3


def best_paths(known: dict, token: int, nodes: int, levels: int, width: int) -> set[tuple[int, ...]]:
    """The paths after a token with the largest products of probabilities, by listing all of them."""
    paths, last = {}, {(): 1.0}
    for _ in range(levels):
        last = {(*path, child): chance * share for path, chance in last.items()
                for child, share in known.get(path[-1] if path else token, [])[:width]}
        paths |= last
    return set(sorted(paths, key=paths.get, reverse=True)[:nodes])


@pytest.mark.oracle("hierarchical")
def test_the_inner_tree_holds_the_most_probable_paths_of_what_the_draft_model_predicted():
    successors = LikelySuccessors()
    logits = torch.randn(6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    successors.learn(list(range(6)), logits, 4)
    for nodes, levels, width in ((10, 3, 4), (30, 2, 3), (7, 4, 2)):
        tree = TokenTree()
        successors.grow(tree, -1, 2, TreeShape(nodes, levels, width), lambda token: False)
        found = {tuple(tree.prefix(node)) for node in range(len(tree))}
        assert found == best_paths(successors.known, 2, nodes, levels, width)
        assert all(tree.parents[node] < node for node in range(len(tree)))


def test_a_tree_saves_forwards_of_the_draft_model():
    models, tree = agreeing(1000), {"inner_draft": "tree"}
    (_, alone), (_, helped) = (
        recorded(speculative_lane("hierarchical", least=6, **tree, nodes=nodes), Models(**models), 48, "abcabc")
        for nodes in (0, 30)
    )
    passes = [sum(event.stream == "draft" for event in of(Forward, events)) for events in (alone, helped)]
    assert passes[1] < passes[0] / 2


class BelievesLookup(find("hierarchical")):
    """Takes the inner draft token as the draft model's own choice."""

    def _follow(self, lm, inner, rows, leaf, chain):
        while children := inner.children(leaf):
            leaf = children[0]
            chain.add(inner.tokens[leaf], len(chain) - 1, rows.p[rows.row(inner.parents[leaf])])
        return super()._follow(lm, inner, rows, leaf, chain)


@pytest.mark.slow
@pytest.mark.oracle("hierarchical")
@pytest.mark.refuses("hierarchical")
@pytest.mark.parametrize("inner", ["lookup", "tree"])
@pytest.mark.parametrize(
    "cls, right", [(find("hierarchical"), True), (BelievesLookup, False)], ids=["checked", "believed"]
)
def test_the_output_distribution_is_the_targets_only_if_the_draft_model_verifies_inner_draft_tokens(cls, right, inner):
    knobs = dict(least=3, ahead=2, inner_draft=inner, nodes=3, levels=2, width=2)
    off = law_distance(with_drafter(cls(**knobs), AT_ONE), tables("ab"), 4, (0, 1, 0, 1, 1))
    assert off < EXACT if right else off > WRONG
