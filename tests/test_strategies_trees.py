"""Draft trees: distinct siblings, stochastic beams, independent drafts, and the overhead of a large tree."""
from __future__ import annotations

from collections import defaultdict
from itertools import permutations, product
from math import e, prod
from time import thread_time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import here
from pairs import pair
from registry import Collapse, title
from tables import Enumerating, TableModel, distance, product_law, write
from toys import byte_tokenizer

from playground import load
from playground.algorithms.speculative.drafting import best, draft_distribution
from playground.algorithms.speculative.verification import Ruling, reject
from playground.algorithms.speculative.without_replacement import RemainingTokens
from playground.contract import Verifier, find, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import ROOT
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.decoding.session import Prompt, prepare
from playground.decoding.visitor_memory import Memory
from playground.engine.sampling import residual_distribution
from playground.errors import Refusal
from playground.events import Verdict
from strategies.speculative.k_seq import optimal_transport as transport
from support.laws import AT_ONE, EXACT, WRONG, tables
from support.speculation import Judged, collapses, divided_by, first_drafts, off, speculative_lane

P, Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


CHAIN = speculative_lane("draft_model", "rejection", AT_ONE, depth=3)


COLLAPSES = {
    "rsd_c": [
        *collapses("rsd_c", branching=""),
        Collapse(speculative_lane("rsd_c", "rejection", AT_ONE, branching="1 1 1"), CHAIN),
    ],
    "rsd_s": [
        *collapses("rsd_s", depth=0),
        Collapse(speculative_lane("rsd_s", "rejection", AT_ONE, width=1, depth=3), CHAIN),
    ],
    "spectr": [
        *collapses("spectr", length=0),
        Collapse(speculative_lane("spectr", "rejection", AT_ONE, rows=1, length=3), CHAIN),
        Collapse(speculative_lane("spectr", "k_seq", AT_ONE, rows=1, length=3), CHAIN),
    ],
}


def golden() -> dict[str, TableModel]:
    """Two models with rows P and Q after every text."""
    return {
        "target": TableModel("abc", rule=lambda context: P.log()),
        "draft": TableModel("abc", rule=lambda context: Q.log()),
    }


def tokens_of_first_round(recipe: LaneConfig, depth: int) -> float:
    return sum(weight * (len(verdict.kept) + 1) for weight, _, verdict in first_drafts(recipe, golden(), depth + 1))


# --- sampling without replacement ---

def test_samples_without_replacement_have_the_order_of_sequential_sampling():
    draws, found = Enumerating(), defaultdict(float)
    for _ in draws.runs():
        remaining = RemainingTokens(P)
        found[tuple(remaining.take(lambda rest: draws.pick(rest, "remaining", 0)) for _ in range(3))] += draws.weight
        assert remaining.left == remaining.distinct == 0
    expected = {order: float(P[order[0]] * P[order[1]] / (1 - P[order[0]])) for order in permutations(range(3))}
    assert distance(found, expected) < 1e-12


def sequences_without_replacement(model: TableModel, prompt: list[int], width: int, length: int) -> dict[tuple, float]:
    """Distribution of the ordered beam by the chain rule: `width` continuations sampled without replacement."""
    chance = product_law(model, prompt, length)

    def drawn(order: tuple) -> float:
        return prod(chance[text] / (1 - sum(chance[before] for before in order[:i])) for i, text in enumerate(order))

    return {order: drawn(order) for order in permutations(chance, width)}


@pytest.mark.oracle("rsd_s")
@pytest.mark.parametrize("width, depth", [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_the_beam_of_rsd_s_samples_whole_continuations_without_replacement(width, depth):
    models, found = tables("ab" if width == 3 else "abc"), defaultdict(float)
    recipe = speculative_lane("rsd_s", "sample_match", AT_ONE, width=width, depth=depth)
    for weight, tree, _ in first_drafts(recipe, models, depth + 1):
        leaves = [tuple(tree.prefix(node)) for node in range(len(tree)) if len(tree.path(node)) == depth]
        found[tuple(leaves)] += weight
    assert distance(found, sequences_without_replacement(models["draft"], [0], width, depth)) < EXACT


def test_a_beam_of_full_width_holds_every_continuation():
    for _, tree, _ in first_drafts(speculative_lane("rsd_s", "greedy_match", width=9, depth=2), tables("abc"), 3):
        assert {tuple(tree.prefix(node)) for node in range(len(tree))} == {
            *product(range(3)),
            *product(range(3), repeat=2),
        }


def test_greedily_the_beam_of_rsd_s_is_that_of_beam_search():
    models = tables("abcd", seed=3)
    ((_, tree, _),) = first_drafts(speculative_lane("rsd_s", "greedy_match", width=2, depth=2), models, 3)
    first = sorted(product_law(models["draft"], [0], 1).items(), key=lambda item: -item[1])[:2]
    both = product_law(models["draft"], [0], 2)
    second = sorted((text for text in both if text[:1] in dict(first)), key=lambda text: -both[text])[:2]
    assert [tuple(tree.prefix(node)) for node in range(len(tree))] == [text for text, _ in first] + second


@pytest.mark.parametrize("branching, levels", [("3 2", [3, 6]), ("2,2,1", [2, 4, 4]), ("9", [4])])
def test_rsd_c_has_the_requested_number_of_distinct_children(branching, levels):
    for _, tree, _ in first_drafts(speculative_lane("rsd_c", "greedy_match", branching=branching), tables("abcd"), 4):
        assert [
            sum(len(tree.path(node)) == level for node in range(len(tree))) for level in range(1, tree.depth() + 1)
        ] == levels
        assert len({tuple(tree.prefix(node)) for node in range(len(tree))}) == len(tree)


@pytest.mark.parametrize("branching", ["8 8", "0", "two", "2 -1", "65"])
def test_an_impossible_tree_is_refused_in_one_sentence(branching):
    with pytest.raises(Refusal, match=r"^branching must be whole numbers.*\.$"):
        make("rsd_c", branching=branching)


@pytest.mark.parametrize("branching, tokens", [("1", 1.7), ("2", 1.808571), ("3", 2.0)])
def test_distinct_siblings_have_the_acceptance_rate_of_the_recursive_rule(branching, tokens):
    assert tokens_of_first_round(
        speculative_lane("rsd_c", "rejection", AT_ONE, branching=branching), 1
    ) == pytest.approx(tokens, abs=1e-6)
    assert tokens_of_first_round(
        speculative_lane("rsd_s", "rejection", AT_ONE, width=int(branching)), 1
    ) == pytest.approx(tokens, abs=1e-6)


def test_with_as_many_nodes_distinct_siblings_are_accepted_more_often_than_independent_ones():
    distinct = speculative_lane("rsd_c", "rejection", AT_ONE, branching="2 1")
    independent = speculative_lane("draft_model", "rejection", AT_ONE, depth=2, width=2, branching=1)
    assert tokens_of_first_round(distinct, 2) > tokens_of_first_round(independent, 2) + 0.05


@pytest.mark.parametrize(
    "recipe",
    [
        speculative_lane("rsd_c", "rejection", AT_ONE, branching="2 1"),
        speculative_lane("rsd_s", "rejection", AT_ONE, width=2),
        speculative_lane("spectr", "k_seq", AT_ONE),
    ],
    ids=title,
)
def test_if_the_draft_is_the_target_the_first_path_is_accepted_entirely(recipe):
    twin = TableModel("abc")
    for _, tree, verdict in first_drafts(recipe, {"target": twin, "draft": twin}, 3):
        assert verdict.kept == [tree.order[0], tree.children(tree.order[0])[0]] and verdict.origin == "bonus"


# --- wrong ways to sample and verify siblings ---


class MostProbable(find("rsd_c")):
    """Siblings that were chosen, declared as sampled."""

    def _children(self, lm, tree, rows, leaf, width):
        q = draft_distribution(lm, tree, rows, leaf)
        nodes = best(tree, leaf, q, width)
        tree.q[nodes[0]:] = [q] * len(nodes)
        return nodes


class Pruned(find("rsd_c")):
    """Feeds only the most probable of the sampled siblings."""

    def _children(self, lm, tree, rows, leaf, width):
        q, remaining = (
            draft_distribution(lm, tree, rows, leaf),
            RemainingTokens(draft_distribution(lm, tree, rows, leaf)),
        )
        tokens = [remaining.take(lambda rest: lm.draw(rest, 0, "draft")) for _ in range(width)]
        return [tree.add(max(tokens, key=lambda token: float(q[token])), leaf, q)]


class Merged(find("spectr")):
    """Loses how often a node was sampled."""

    def propose(self, lm, budget):
        tree = yield from super().propose(lm, budget)
        tree.order = list(dict.fromkeys(tree.order))
        return tree


def turned_round(p, children, tree, flip, draw) -> Ruling:
    return reject(p, children[::-1], tree, flip, draw)


def against_q_as_it_was(p, children, tree, flip, draw) -> Ruling:
    r = p
    for child in children:
        token, q = tree.tokens[child], tree.q[child]
        if flip(min(1.0, float(r[token] / q[token])))[0]:
            return Ruling(child)
        r = residual_distribution(r, q)
    return Ruling(None, draw(r))


WRONG_WAYS = {
    "the most probable siblings taken for drawn ones": (MostProbable("2"), Judged(reject)),
    "the best of the drawn siblings fed alone": (Pruned("2"), Judged(reject)),
    "siblings judged in another order than drawn": (make("rsd_c", branching="2"), Judged(turned_round)),
    "a stochastic beam judged in another order than drawn": (make("rsd_s", width=2), Judged(turned_round)),
    "ratios against q as it was before the first sibling": (make("rsd_c", branching="2"), Judged(against_q_as_it_was)),
    "k-SEQ that divides by nothing": (make("spectr", rows=2), Judged(divided_by(lambda k: 1.0))),
    "k-SEQ over distinct siblings": (make("rsd_c", branching="2"), Judged(transport.k_seq)),
    "k-SEQ over rows that were merged without a count": (Merged(2, 4), Judged(transport.k_seq)),
}
RIGHT_WAYS = {
    "rsd_c": (make("rsd_c", branching="2"), Judged(reject)),
    "rsd_s": (make("rsd_s", width=2), Judged(reject)),
    "k-SEQ": (make("spectr", rows=2), Judged(transport.k_seq)),
    "k-SEQ that divides by more than it has to": (make("spectr", rows=2), Judged(divided_by(float))),
}


@pytest.mark.refuses("rsd_c", "spectr", "k_seq")
@pytest.mark.parametrize("drafter, verifier", WRONG_WAYS.values(), ids=WRONG_WAYS)
def test_a_wrong_drafter_or_verifier_is_detected(drafter, verifier):
    assert off(drafter, verifier) > WRONG


@pytest.mark.oracle("rsd_c", "rsd_s", "spectr")
@pytest.mark.parametrize("drafter, verifier", RIGHT_WAYS.values(), ids=RIGHT_WAYS)
def test_correct_drafters_and_verifiers_keep_the_targets_distribution(drafter, verifier):
    assert off(drafter, verifier) < EXACT


# --- k-SEQ ---

def test_rho_and_acceptance_equal_a_worked_example():
    for k, rho, accepted in [(1, 1.0, 0.7), (2, 1.456776, 0.791355), (3, 1.792593, 0.858519)]:
        found = transport.division(P, Q, k)
        assert found == pytest.approx(rho, abs=1e-5)
        assert transport.accepted_at_all(transport.accepted_once(P, Q, found), k) == pytest.approx(accepted, abs=1e-5)
        assert (
            tokens_of_first_round(speculative_lane("spectr", "k_seq", AT_ONE, rows=k, length=1), 1)
            >= 1 + accepted - 1e-6
        )
    assert transport.residual(P, Q, 2, transport.division(P, Q, 2)).tolist() == pytest.approx([1, 0, 0], abs=1e-6)


def test_a_resampled_token_that_some_row_drafted_keeps_that_row_in_step():
    def refused_and_kept(verdict: Verdict) -> set[int]:
        return set(verdict.kept) - {test.node for test in verdict.tests if test.kept}

    verdicts = [
        verdict
        for _, _, verdict in first_drafts(speculative_lane("spectr", "k_seq", AT_ONE, length=1), tables("ab"), 2)
    ]
    assert any(refused_and_kept(verdict) and verdict.origin == "bonus" for verdict in verdicts)


@st.composite
def distributions(draw, size: int):
    weights = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any))
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), size=st.integers(2, 5), k=st.integers(1, 8))
def test_k_seq_gives_p_and_is_close_to_the_optimal_acceptance(data, size, k):
    p, q = data.draw(distributions(size)), data.draw(distributions(size))
    rho = transport.division(p, q, k)
    beta = transport.accepted_once(p, q, rho)
    accepted = transport.accepted_at_all(beta, k)
    stands = torch.minimum(p / rho, q) * (accepted / beta if beta else 0)
    assert (p - stands).min() > -1e-12, "some token stands more often than the target says it"
    assert (stands + (1 - accepted) * transport.residual(p, q, k, rho) - p).abs().max() < 1e-9
    assert (1 - 1 / e) * best_acceptance(p, q, k) - 1e-9 <= accepted <= best_acceptance(p, q, k) + 1e-9


def best_acceptance(p: torch.Tensor, q: torch.Tensor, k: int) -> float:
    """Optimal transport with membership cost, as a flow from drafts to tokens: its value is that of the minimum cut,
    one for each set of tokens.
    """
    sets = map(list, product([False, True], repeat=len(p)))
    return min(float(p[chosen].sum() + 1 - q[chosen].sum() ** k) for chosen in sets)


def test_the_optimal_acceptance_equals_the_linear_program():
    assert best_acceptance(P, Q, 2) == pytest.approx(0.86) and best_acceptance(P, P, 3) == pytest.approx(1)


@pytest.mark.parametrize("p, q, rho", [(P, P, 1.0), (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 1.0)])
def test_rho_is_well_defined_for_equal_and_disjoint_models(p, q, rho):
    assert transport.division(p, q, 4) == rho
    assert torch.equal(
        transport.residual(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 4, 1.0), torch.tensor([1.0, 0.0])
    )


def test_distinct_draft_tokens_are_refused_by_rules_for_independent_ones():
    for drafter in ("rsd_c", "rsd_s", "token_recycling"):
        with pytest.raises(Refusal, match="k-SEQ is exact for draft tokens that are drawn independently"):
            assemble(speculative_lane(drafter, "k_seq", AT_ONE))


def test_rows_with_equal_prefixes_share_nodes_with_a_count():
    for _, tree, _ in first_drafts(
        speculative_lane("spectr", "sample_match", AT_ONE, rows=3, length=1), tables("ab"), 2
    ):
        assert len(tree) == len(set(tree.tokens)) and len(tree.order) == 3
        assert tree.children(ROOT) == tree.order


START = [5, 9, 2, 7, 7, 1]


# --- shared random numbers ---

@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("drafter", ["rsd_c", "rsd_s", "spectr", "token_recycling", "layer_skip_draft"])
def test_sample_and_match_equals_plain_sampling_for_any_tree(drafter, architecture):
    models = {"target": pair(architecture).target, "draft": pair(architecture).draft}
    samplers = [("temperature", {"t": 0.7}), ("top_p", {"p": 0.9}), ("repetition_penalty", {"penalty": 1.2})]
    plain, guessed = (
        write(assemble(recipe), models, START, Limits(5, 12), Draws(5)).tokens
        for recipe in (LaneConfig("greedy", {}, samplers), speculative_lane(drafter, "sample_match", *samplers))
    )
    assert plain == guessed


# --- the overhead of a large tree ---

def test_a_row_computed_alone_equals_the_row_computed_among_all():
    compared = []

    class Comparing(Verifier):
        def judge(self, lm, tree, rows):
            nodes = range(ROOT, len(tree))
            alone, best = [rows.distribution(node) for node in nodes], [rows.best(node) for node in nodes]
            assert "stages" not in vars(rows) or len(nodes) == 1, "all rows were computed for one"
            assert torch.equal(torch.stack(alone), rows.p) and best == rows.scores.argmax(-1).tolist()
            compared.append(len(nodes))
            return make("sample_match").judge(lm, tree, rows)

    tokenizer = byte_tokenizer()
    models = {"target": TableModel(tokenizer=tokenizer), "draft": TableModel(tokenizer=tokenizer, seed=1)}
    toggles = [
        ("regex", {"pattern": "[a-f]{12}"}),
        AT_ONE,
        ("top_p", {"p": 0.8}),
        ("repetition_penalty", {"penalty": 1.5}),
    ]
    assembly = assemble(speculative_lane("rsd_c", "sample_match", *toggles))
    assembly.decoder.verifier = Comparing()
    write(assembly, models, [54, 71], Limits(0, 12), Draws(0))
    assert max(compared) > 10


class RowsCounted(find("temperature")):
    """Records how many rows it is given."""

    def apply(self, scores, histories):
        assert len(histories) == len(scores)
        self.given.append(len(scores))
        return super().apply(scores, histories)


@pytest.mark.parametrize("verifier", ["sample_match", "rejection"])
def test_samplers_see_only_the_visited_rows_of_a_tree(verifier):
    chance = torch.randn(9, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    model, assembly = (
        TableModel("abcdefghi", rule=lambda context: chance[context[-1]]),
        assemble(speculative_lane("token_recycling", verifier, AT_ONE)),
    )
    assembly.samplers = [RowsCounted(1.0)]
    assembly.samplers[0].given = []
    lane = write(assembly, {"target": model}, [0], Limits(0, 40), Draws(0))
    assert sum(lane.assembly.samplers[0].given) == lane.generated, "a row for each token, whatever the size of the tree"


def test_a_round_of_sixty_four_rows_has_at_most_two_milliseconds_of_overhead(monkeypatch):
    """In CPU time of this thread, so that other load on the machine does not count."""
    models, costs, forward = load(), [], [0.0, 0]
    original = models.target.forward

    def timed(works, plan=None):
        start = thread_time()
        answer = original(works, plan)
        forward[:] = [thread_time() - start, sum(len(work.tokens) for work in works)]
        return answer

    monkeypatch.setattr(models.target, "forward", timed)
    recipe = speculative_lane("token_recycling", "sample_match", AT_ONE, ("top_p", {"p": 0.9}), nodes=63)
    memory = Memory()
    for seed in range(2):  # the second text finds the memory filled
        session = prepare(
            models,
            [recipe],
            Prompt("Once upon a time there was a king who had three sons."),
            Limits(seed, 64),
            memory=memory,
        )
        while not session.finished:
            start = thread_time()
            session.advance()
            costs.append((forward[1], thread_time() - start - forward[0]))
    large = [cost for rows, cost in costs[1:] if rows >= 60]
    assert len(large) > 5 and min(large) < here(0.002)
