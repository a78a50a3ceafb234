"""DySpec: a tree of draft tokens that grows by the probabilities of the draft."""
from __future__ import annotations

from math import prod

import pytest
import torch
from drafting_runs import recorded
from registry import Collapse
from tables import TableModel, watch

from playground.algorithms.speculative.drafting import draft_distribution
from playground.algorithms.speculative.verification import reject
from playground.algorithms.speculative.without_replacement import Ranking, RemainingTokens
from playground.contract import find, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.events import Draft, Figure, Forward
from support.laws import AT_ONE, EXACT, WRONG
from support.speculation import Judged, collapses, first_drafts, off, speculative_lane

ONE_GUESS = speculative_lane("draft_model", "rejection", AT_ONE, depth=1)
COLLAPSES = {
    "dyspec": [
        *collapses("dyspec", nodes=0),
        Collapse(speculative_lane("dyspec", "rejection", AT_ONE, nodes=1), ONE_GUESS),
    ],
}


@pytest.mark.parametrize("most", [1, 3, 5, 9])
def test_greedily_the_most_probable_tokens_are_taken_in_order_and_the_residual_is_the_rest(most):
    chances = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2], dtype=torch.float64)
    ranking, taken = Ranking(chances, most), 0.0
    for token in [1, 3, 4, 0, 2][:most]:
        assert ranking.left == pytest.approx(1 - taken)
        assert ranking.take() == (token, float(chances[token]))
        taken += float(chances[token])
    assert ranking.left == 0


class Summed(torch.Tensor):
    """A distribution that counts its passes over the whole vocabulary."""

    passes = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ in ("cumsum", "sum", "clone", "div", "__rtruediv__", "sort", "topk", "gt"):
            Summed.passes += 1
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def test_sixty_four_samples_without_replacement_take_one_pass_over_the_vocabulary():
    remaining, draws = RemainingTokens(torch.ones(5000).softmax(-1).as_subclass(Summed)), Draws(0)
    Summed.passes = 0
    assert len({draws.take(remaining, "draft", 0) for _ in range(64)}) == 64
    assert remaining.left == pytest.approx(1 - 64 / 5000, rel=1e-4)
    assert Summed.passes == 1


@pytest.mark.oracle("dyspec")
def test_sampling_over_one_cumulative_sum_equals_sampling_from_renormalised_rows():
    """Until none remains, with tokens of probability 0 and some so improbable that subtraction would round."""
    chances = torch.tensor([0.0, 0.3, 1e-9, 0.0, 0.5, 0.2 - 1e-9, 1e-12, 0.0], dtype=torch.float64)
    for seed in range(200):
        lazy, whole, rest, taken = RemainingTokens(chances), Draws(seed), chances.clone(), []
        draws = Draws(seed)
        for _ in range(5):
            expected = whole.pick(rest / rest.sum(), "draft", 0)
            rest[expected] = 0
            assert draws.take(lazy, "draft", 0) == expected
            assert lazy.left == pytest.approx(float(rest.sum()), rel=1e-6)
            taken.append(expected)
        assert sorted(taken) == [1, 2, 4, 5, 6] and lazy.left == lazy.distinct == 0


def drawn_from(odds: dict[str, list[float]], size: int = 3) -> TableModel:
    """A model whose probabilities depend on the letters after the prompt; uniform where none are given."""
    def rule(context):
        return torch.tensor(
            odds.get("".join("abc"[token] for token in context[1:]), [1 / size] * size), dtype=torch.float64
        ).log()

    return TableModel("abcdefghijklmnopqrstuvwxyz"[:size], rule=rule)


def tree_of(config: LaneConfig, models: dict, length: int = 20) -> TokenTree:
    ((_, tree, _),) = first_drafts(config, models, length)
    return tree


def paths(tree: TokenTree) -> list[str]:
    return ["".join(chr(97 + token) for token in tree.prefix(node)) for node in range(len(tree))]


BY_HAND = {"": [0.6, 0.3, 0.1], "a": [0.9, 0.05, 0.05], "aa": [0.5, 0.3, 0.2], "b": [0.2, 0.7, 0.1]}


@pytest.mark.oracle("dyspec")
def test_dyspecs_tree_grows_in_the_order_of_a_worked_example():
    models = {"target": TableModel("abc"), "draft": drawn_from(BY_HAND)}
    assert paths(tree_of(speculative_lane("dyspec", "greedy_match", nodes=5), models)) == ["a", "aa", "aaa", "b", "bb"]


def test_a_certain_draft_makes_a_chain_and_an_uncertain_one_siblings():
    sure = TableModel("abc", rule=lambda context: torch.tensor([50.0, 0.0, 0.0], dtype=torch.float64))
    # so that no two are equal
    even = TableModel("abcdefghij", rule=lambda context: -1e-9 * torch.arange(10, dtype=torch.float64))
    for draft, shape in ((sure, ["a" * n for n in range(1, 7)]), (even, list("abcdef"))):
        assert (
            paths(
                tree_of(
                    speculative_lane("dyspec", "greedy_match", nodes=6),
                    {"target": TableModel(draft.letters), "draft": draft},
                )
            )
            == shape
        )


@pytest.mark.parametrize("nodes", [3, 7, 12])
def test_the_threshold_variant_equals_the_heap_variant_at_the_last_probability(nodes):
    models = {"target": TableModel("abcd"), "draft": TableModel("abcd", seed=6)}
    one_by_one = tree_of(speculative_lane("dyspec", "greedy_match", nodes=nodes), models)
    least = min(needed(one_by_one.tokens, one_by_one.parents, one_by_one.confidence))
    drafter = find("dyspec")(nodes=64, mode="threshold", threshold=least - 1e-9)
    assembly = assemble(speculative_lane("dyspec", "greedy_match"))
    seen = []
    assembly.decoder.drafter = drafter
    assembly.decoder.verifier = recording(seen)
    for lane in watch(assembly, models, [0], Limits(0, 20), Draws(0)):
        if lane.generated:
            break
    assert sorted(paths(seen[0])) == sorted(paths(one_by_one))


def recording(trees: list):
    class Recording(find("greedy_match")):
        def judge(self, lm, tree, rows):
            trees.append(tree)
            return super().judge(lm, tree, rows)

        def __deepcopy__(self, memo):
            return self

    return Recording()


def needed(tokens: list[int], parents: list[int], q: list[float]) -> list[float]:
    """The probability that each draft token is reached: all ancestors accepted, all earlier siblings on the path
    rejected.
    """
    shares, chances = [], []
    for node, parent in enumerate(parents):
        before = [sibling for sibling in range(node) if parents[sibling] == parent]
        shares.append(q[node] / (1 - sum(q[sibling] for sibling in before)))
        above = 1.0 if parent == ROOT else chances[parent] * shares[parent]
        chances.append(above * prod(1 - shares[sibling] for sibling in before))
    return chances


def test_draft_tokens_report_their_estimated_acceptance_in_descending_order():
    _, events = recorded(speculative_lane("dyspec", "rejection", AT_ONE, nodes=20))
    drafts = [event for event in events if isinstance(event, Draft)]
    figures = [event.data["values"] for event in events if isinstance(event, Figure)]
    assert len(drafts) == len(figures) > 5
    for draft, (root, *values) in zip(drafts, figures):
        assert root == 1 and values == pytest.approx(needed(draft.tokens, draft.parents, draft.q), abs=1e-9)
        assert all(later <= earlier + 1e-12 for earlier, later in zip(values, values[1:]))


@pytest.mark.slow
def test_a_tree_by_probability_has_more_tokens_accepted_than_one_of_fixed_shape():
    models = {"target": TableModel("abcd", seed=3, spread=3), "draft": TableModel("abcd", seed=3, spread=3)}
    spent = [
        sum(weight * len(verdict.kept) for weight, _, verdict in first_drafts(config, models, 4))
        for config in (
            speculative_lane("dyspec", "rejection", AT_ONE, nodes=3),
            speculative_lane("rsd_c", "rejection", AT_ONE, branching="1 2"),
        )
    ]
    assert spent[0] > spent[1]


def test_the_threshold_variant_takes_one_draft_forward_per_level():
    _, events = recorded(speculative_lane("dyspec", "greedy_match", mode="threshold", threshold=0.05))
    asked, drafts = 0, []
    for event in events:
        asked += isinstance(event, Forward) and event.stream == "draft"
        if isinstance(event, Draft):
            drafts.append((asked, TokenTree(parents=event.parents, tokens=event.tokens).depth()))
            asked = 0
    assert len(drafts) > 3 and all(asked <= depth + 1 for asked, depth in drafts)


class TakesTheBest(find("dyspec")):
    """The most probable tokens, declared as sampled."""

    def _draw(self, lm, tree, remaining, parent, position):
        left = remaining.left
        node = tree.add(remaining.take(lambda rest: int(rest.argmax())), parent, remaining.q)
        return node, float(remaining.q[tree.tokens[node]]) / left


class DropsTheUnlikely(find("dyspec")):
    """Samples more than it needs and feeds the most probable ones."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        return tree.only(
            [node for node in range(len(tree)) if tree.confidence[node] > 0.3 and tree.parents[node] == ROOT]
        )


class JudgesAtAnotherTemperature(find("dyspec")):
    """Samples at one temperature and reports q at another."""

    def _remaining(self, lm, tree, rows, parent):
        remaining = RemainingTokens((draft_distribution(lm, tree, rows, parent).log() / 0.3).softmax(-1))
        remaining.q = draft_distribution(lm, tree, rows, parent)
        return remaining


@pytest.mark.slow
@pytest.mark.oracle("dyspec")
@pytest.mark.refuses("dyspec")
def test_a_tree_by_probability_keeps_the_targets_distribution_and_wrong_ones_do_not():
    for right in (
        make("dyspec", nodes=4),
        make("dyspec", nodes=4, temperature=0.3),
        make("dyspec", mode="threshold", threshold=0.2),
    ):
        assert off(right, Judged(reject)) < EXACT
    for wrong in (TakesTheBest(2), DropsTheUnlikely(3), JudgesAtAnotherTemperature(2)):
        assert off(wrong, Judged(reject)) > WRONG, type(wrong).__name__
