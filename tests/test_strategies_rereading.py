"""Draft tokens for the draft model, and draft tokens that are verified twice."""
from __future__ import annotations

import pytest
import torch
from pairs import pair
from registry import Collapse
from tables import TableModel, write

from playground.algorithms.speculative.successor_tree import LikelySuccessors, TreeShape
from playground.contract import Verifier, find, make
from playground.contract.lane_config import Assembly, LaneConfig, assemble
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.decoding.models import Models
from playground.decoding.rng import Draws
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from playground.events import Forward
from playground.trace import metrics
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.parallel_drafting import agreeing
from support.speculation import GREEDY, collapses, speculative_lane
from support.speculative_runs import CHAIN, law_distance, of, recorded, with_drafter

COLLAPSES = {
    "reflective": [
        Collapse(LaneConfig("reflective", {"alpha": 0.0}), GREEDY),
        Collapse(LaneConfig("reflective", {"alpha": 0.0}, [("draft_model", {"depth": 3}), AT_ONE]), CHAIN),
        Collapse(
            LaneConfig("reflective", {"alpha": 0.0, "mix": "probabilities"}, [("draft_model", {"depth": 3}), AT_ONE]),
            CHAIN,
        ),
    ],
    "hierarchical": [
        *collapses("hierarchical", least=0),
        Collapse(speculative_lane("hierarchical", "rejection", AT_ONE, least=3, ahead=0), CHAIN),
        Collapse(speculative_lane("hierarchical", "rejection", AT_ONE, least=3, inner_draft="tree", nodes=0), CHAIN),
    ],
}


START = [5, 9, 2, 7, 7, 1]


# --- an inner drafter ---

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


# --- reflective verification: two rows for each draft token ---

Reflective = find("reflective")


class Shifted(Reflective):
    """Takes each second row for that of the position before it."""

    def mixed(self, first, second):
        return super().mixed(first, second.roll(1, 0))


def reflecting(cls: type = Reflective, drafter: str = "draft_model", **knobs) -> Assembly:
    assembly = assemble(LaneConfig("reflective", {}, [(drafter, {"depth": 3})]))
    return Assembly(cls(assembly.decoder.drafter, assembly.decoder.verifier, **knobs))


def read_after(model: Model, tokens: list[int], count: int) -> torch.Tensor:
    """The last `count` rows [count, V] of a fresh forward."""
    return model.forward([ForwardInput(model.new_store(), tokens, list(range(-1, len(tokens) - 1)))])[0][0][-count:]


@pytest.mark.oracle("reflective")
@pytest.mark.refuses("reflective")
@pytest.mark.parametrize("cls, right", [(Reflective, True), (Shifted, False)], ids=["aligned", "shifted"])
@pytest.mark.parametrize("ending", [0, 4])
def test_draft_tokens_are_verified_with_a_mixture_of_two_rows(cls, right, ending):
    models, off = {"target": pair().target, "draft": pair().draft}, []

    class Comparing(Verifier):
        def judge(self, lm, tree, rows):
            if len(tree) and lm.generated:
                behind = [*lm.spell("again:"), *lm.tokens[len(lm.tokens) - ending:], *tree.tokens]
                first = read_after(models["target"], lm.tokens + tree.tokens, len(tree) + 1)
                second = read_after(models["target"], lm.tokens + tree.tokens + behind, len(tree) + 1)
                off.append(float((rows.scores[:len(tree) + 1] - (0.7 * first + 0.3 * second)).abs().max()))
            return make("rejection").judge(lm, tree, rows)

    assembly = reflecting(cls, ask="again:", ending=ending)
    assembly.decoder.verifier = Comparing()
    write(assembly, models, START, Limits(0, 16), Draws(0))
    assert len(off) > 2 and (max(off) < 1e-9) == right


def copying() -> TableModel:
    """Repeats the earlier continuation of the same two tokens; for new ones any continuation."""
    opinion = TableModel("abcdefgh", seed=5)

    def scores(context):
        earlier = [context[i + 2] for i in range(len(context) - 2) if context[i:i + 2] == context[-2:]]
        return 9 * torch.eye(8, dtype=torch.float64)[earlier[-1]] if earlier else opinion.scores(context)

    return TableModel("abcdefgh", rule=scores)


def accepted(alpha: float, **knobs) -> float:
    """Acceptance rate of an uninformed draft with a target that copies from its context."""
    models = Models(copying(), TableModel("abcdefgh", seed=9))
    config = LaneConfig("reflective", {"alpha": alpha, "ask": "", **knobs}, [("draft_model", {"depth": 4})])
    return metrics(recorded(config, models, 40, "abc")[0].trace)["acceptance_rate"]


@pytest.mark.slow
def test_a_copying_target_accepts_more_wrong_tokens_as_the_second_row_gains_weight():
    shares = [accepted(alpha) for alpha in (0.0, 0.5, 1.0)]
    assert shares[0] < 0.3 and shares == sorted(shares) and shares[-1] > 0.6


@pytest.mark.slow
def test_tokens_accepted_only_by_reflection_are_reported():
    models = Models(copying(), TableModel("abcdefgh", seed=9))
    config = LaneConfig("reflective", {"alpha": 1.0, "ask": ""}, [("draft_model", {"depth": 4})])
    notes = [event.text for event in recorded(config, models, 40, "abc")[1] if event.kind == "note"]
    assert notes and all("top token" in note for note in notes)
    assert not [
        event
        for event in recorded(LaneConfig("reflective", {"alpha": 0.0}), models, 40, "abc")[1]
        if event.kind == "note"
    ]


def test_without_context_for_a_second_row_one_is_used():
    models = {"target": TableModel("abcde", context=24), "draft": TableModel("abcde", seed=1, context=24)}
    plain, reflected = (write(assemble(config), models, [0, 1, 2], Limits(0, 50), Draws(0)) for config in
                        (GREEDY, LaneConfig("reflective", {"alpha": 0.0, "ending": 4})))
    assert plain.tokens == reflected.tokens and len(plain.tokens) == 24
