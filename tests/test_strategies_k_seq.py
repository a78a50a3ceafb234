"""k-SEQ, shared random numbers, and the overhead of a large tree."""
from __future__ import annotations

from itertools import product
from math import e
from time import thread_time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import here
from pairs import pair
from tables import TableModel, write
from toys import byte_tokenizer

from playground import load
from playground.algorithms.speculative.verification import Ruling, walk
from playground.contract import Verifier, find, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import ROOT
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.rng import Draws
from playground.decoding.session import prepare
from playground.decoding.visitor_memory import Memory
from playground.engine.sampling import residual_distribution
from playground.errors import Refusal
from playground.events import Verdict
from strategies.speculative.k_seq import optimal_transport as transport
from support.draft_trees import P, Q, tokens_of_first_round
from support.laws import AT_ONE, tables
from support.speculation import first_drafts, speculative_lane
from support.speculation_oracles import assert_refused, check_law

# --- k-SEQ ---

@pytest.mark.slow
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


@pytest.mark.slow
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
        write(assemble(config), models, START, Limits(5, 12), Draws(5)).tokens
        for config in (LaneConfig("greedy", {}, samplers), speculative_lane(drafter, "sample_match", *samplers))
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


@pytest.mark.slow
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
    config = speculative_lane("token_recycling", "sample_match", AT_ONE, ("top_p", {"p": 0.9}), nodes=63)
    memory = Memory()
    for seed in range(2):  # the second text finds the memory filled
        session = prepare(
            models,
            [config],
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


class DividesByNothing(find("k_seq")):
    """rho = 1 however many rows drafted, and the residual of a single one."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            p, position, q = rows.distribution(node), rows.position(node), tree.q[children[0]]
            for child in children:
                token = tree.tokens[child]
                if lm.flip(min(1.0, float(p[token] / q[token])), position)[0]:
                    return Ruling(child)
            return Ruling(None, lm.draw(residual_distribution(p, q), position, "redraw"))

        return walk(lm, tree, rows, rule)


@pytest.mark.oracle("k_seq")
def test_k_seq_keeps_the_targets_distribution():
    check_law(make("k_seq"), make("spectr", rows=2, length=2))


@pytest.mark.refuses("k_seq")
def test_k_seq_without_its_divisor_has_another_distribution():
    assert_refused(check_law, DividesByNothing(), make("spectr", rows=2, length=2))
