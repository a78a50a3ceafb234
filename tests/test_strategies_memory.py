"""Draft tokens from earlier rows: STAND and ADED."""
from __future__ import annotations

from collections import defaultdict
from itertools import permutations

import pytest
import torch
from drafting_runs import constant, passes, recorded, recording_rejections
from tables import Enumerating, TableModel, distance, watch, write

from playground.algorithms.speculative.verification import reject
from playground.contract import find, make
from playground.contract.lane_config import assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.decoding.visitor_memory import Memory
from support.laws import AT_ONE, EXACT, WRONG
from support.speculation import Judged, collapses, off, speculative_lane

COLLAPSES = {
    "stand": collapses("stand", nodes=0),
    "aded": [*collapses("aded", nodes=0), *collapses("aded", gain=0, prompt=False)],
}


# --- STAND ---

stand = __import__(find("stand").__module__, fromlist=["NGramDistributions"])
aded = __import__(find("aded").__module__, fromlist=["TriGrams"])


def row(*p: float) -> torch.Tensor:
    return torch.tensor(p, dtype=torch.float64)


def test_memory_holds_the_mean_of_the_rows():
    thoughts = stand.NGramDistributions()
    for p, mean in [(row(0.8, 0.2), (0.8, 0.2)), (row(0.2, 0.8), (0.5, 0.5)), (row(0.2, 0.8), (0.4, 0.6))]:
        thoughts.learn([7], p, 1, 10)
        likely, _ = thoughts.after([7], 1)
        assert [likely[token] for token in (0, 1)] == pytest.approx(mean)


def test_the_longest_known_suffix_is_used_and_its_probabilities_sum_to_one():
    thoughts = stand.NGramDistributions()
    thoughts.learn([1, 2, 3], row(0.5, 0.3, 0.2), 3, 2)
    thoughts.learn([9, 3], row(0.0, 0.0, 1.0), 1, 2)
    assert thoughts.after([1, 2, 3], 3) == (pytest.approx({0: 0.625, 1: 0.375}), 3)
    assert (
        thoughts.after([5, 2, 3], 3)[1] == 2
        and thoughts.after([5, 5, 3], 3)[1] == 1
        and thoughts.after([3, 5], 3) == ({}, 0)
    )
    assert thoughts.after([1, 2, 3], 1)[0] != thoughts.after([1, 2, 3], 3)[0]


class Primed(find("stand")):
    """Has the same row after every text."""

    beliefs = {0: 0.6, 1: 0.3, 2: 0.1}

    def _begin(self, lm):
        super()._begin(lm)
        self._memory.known = {(token,): (dict(self.beliefs), 1) for token in range(3)}


@pytest.mark.oracle("stand")
def test_siblings_are_sampled_from_memory_without_replacement():
    found, draws = defaultdict(float), Enumerating()
    assembly = assemble(speculative_lane("stand", "rejection", AT_ONE))
    assembly.decoder.drafter = Primed(2)
    seen: list = []
    assembly.decoder.verifier = recording_rejections(seen)
    for _ in draws.runs():
        seen.clear()
        for lane in watch(assembly, {"target": constant()}, [0], Limits(0, 2), draws):
            if lane.generated:
                break
        found[tuple(seen[0][0].tokens)] += draws.weight
    p = Primed.beliefs
    assert distance(found, {(a, b): p[a] * p[b] / (1 - p[a]) for a, b in permutations(range(3), 2)}) < EXACT
    assert found[0, 1] == pytest.approx(0.45)


class PassedForDrawn(Primed):
    """The most probable tokens, declared as sampled."""

    def _children(self, lm, tree, parent, likely, width, like):
        q = torch.zeros_like(like)
        q[list(likely)] = torch.tensor(list(likely.values()), dtype=like.dtype)
        return [tree.add(token, parent, q) for token in list(likely)[:width]]


class NotScaledUp(Primed):
    """Reports the whole stored row, though only the most probable tokens were stored."""

    def _children(self, lm, tree, parent, likely, width, like):
        children = super()._children(lm, tree, parent, likely, width, like)
        for child in children:
            tree.q[child] = tree.q[child] * 0.7
        return children


@pytest.mark.oracle("stand")
@pytest.mark.refuses("stand")
def test_the_output_distribution_is_the_targets_whatever_memory_holds_and_mistakes_are_detected():
    for right in (Primed(3), Primed(3, stochastic=False)):
        assert off(right, Judged(reject)) < EXACT
    for wrong in (PassedForDrawn(2), NotScaledUp(2)):
        assert off(wrong, Judged(reject)) > WRONG, type(wrong).__name__


def test_memory_that_agrees_with_the_model_has_its_first_draft_tokens_accepted():
    assembly = assemble(speculative_lane("stand", "rejection", AT_ONE))
    found: list = []
    assembly.decoder.verifier = recording_rejections(found)
    write(assembly, {"target": constant()}, [0], Limits(0, 60), Draws(0))
    warm = [verdict for tree, verdict in found if len(tree)]
    assert len(warm) > 5 and all(verdict.kept[:1] == [0] for verdict in warm)


@pytest.mark.parametrize("name, knob", [("stand", "share"), ("aded", None), ("suffix_decoding", None)])
def test_a_second_answer_to_a_prompt_takes_fewer_forwards(name, knob):
    memory = Memory()
    cold, warm = (
        passes(recorded(speculative_lane(name, "sample_match", AT_ONE), memory, length=40)[0]) for _ in range(2)
    )
    assert warm < 0.8 * cold
    if knob:
        memory = Memory()
        assert [
            passes(recorded(speculative_lane(name, "sample_match", AT_ONE, **{knob: False}), memory, length=40)[0])
            for _ in range(2)
        ] == [cold, cold]
        assert len(memory) == 0


def test_memory_of_one_prompt_does_not_affect_another():
    memory = Memory()
    config = speculative_lane("stand", "sample_match", AT_ONE)
    recorded(config, memory, "The green bird")
    assert passes(recorded(config, memory, "A red fox")[0]) == passes(recorded(config, Memory(), "A red fox")[0])


# --- ADED ---

def table(known: dict) -> object:
    made = aded.TriGrams()
    made.known = known
    return made


def searching(known: dict, **knobs):
    drafter = make("aded", **knobs)
    drafter._table = table(known)
    return drafter


def test_a_tri_gram_gains_weight_with_every_use_up_to_the_cap():
    grams = table({})
    grams.reinforce([1, 2, 3, 4], 0.04, 3.0)
    assert grams.known == {(1, 2): {3: 0.04}, (2, 3): {4: 0.04}}
    for _ in range(99):
        grams.reinforce([1, 2, 3, 4], 0.04, 3.0)
    assert grams.known == {(1, 2): {3: 3.0}, (2, 3): {4: 3.0}}


def test_a_prompt_is_counted_as_shares_and_known_weights_stay():
    grams = table({(1, 2): {9: 0.5}})
    grams.read([1, 2, 3, 1, 2, 3, 1, 2, 4], 2)
    assert grams.known[1, 2] == pytest.approx({3: 2 / 3, 4: 1 / 3, 9: 0.5}) and grams.known[2, 3] == {1: 1.0}


def test_visit_counts_of_a_search_equal_a_worked_example():
    root = searching({(1, 2): {3: 0.9, 4: 0.1}}).search((1, 2))
    assert (root.visits, [child.visits for child in root.children]) == (150, [139, 11])


def test_a_rollout_below_the_tree_has_the_expected_value():
    known = {(0, 1): {1: 0.5, 2: 1.5}, (1, 1): {0: 1.0}, (1, 2): {1: 0.2, 2: 0.6}}
    expected = 0.25 * (0.5 + 1.0) + 0.75 * (1.5 + 0.25 * 0.2 + 0.75 * 0.6)
    assert searching(known)._expected_weight((0, 1), 2, {}) == pytest.approx(expected)


def test_scores_change_the_result_of_a_search():
    known = {(0, 1): {2: 1.0, 3: 1.0}, (1, 2): {4: 0.01}, (1, 3): {4: 3.0}}
    visits = [
        [child.visits for child in searching(known, score=score, c1=1.0).search((0, 1)).children]
        for score in ("weights", "one")
    ]
    assert visits[0][1] > 1.5 * visits[0][0] and visits[1][0] == visits[1][1]


def test_drafted_paths_are_one_token_longer_than_searched():
    ring = {(a, (a + 1) % 9): {(a + 2) % 9: 1.0} for a in range(9)}
    drafter = searching(ring)
    assert max(drafter.most_visited(drafter.search((0, 1))), key=len) == [2, 3, 4, 5]


def test_drafts_fit_the_node_limit_with_the_longest_paths_first():
    drafter = make("aded", nodes=8)
    assert drafter._fitting([[1, 2, 3], [1], [1, 2, 3, 4], [4, 5], [1]]) == [[1, 2, 3], [1], [4, 5]]


def test_a_cyclic_text_takes_one_forward_per_five_tokens_once_learnt():
    size = 9
    ring = TableModel(
        "abcdefghi", rule=lambda context: torch.eye(size, dtype=torch.float64)[(context[-1] + 1) % size] * 50
    )
    write(
        assemble(speculative_lane("aded", "greedy_match")),
        {"target": ring},
        [*range(9), 0, 1],
        Limits(0, 40),
        Draws(0),
    )
    assert ring.forwards == 1 + 40 / 5


class Swallows(find("aded")):
    """Rejected draft tokens gain weight as if they had been committed."""

    def observe(self, tree, rows, verdict):
        for node in range(len(tree)):
            self._table.reinforce([*rows.committed[-2:], *tree.prefix(node)], self.gain, self.cap)


@pytest.mark.parametrize("cls, right", [(find("aded"), True), (Swallows, False)], ids=["kept", "refused too"])
def test_the_table_gains_only_what_was_written(cls, right):
    assembly = assemble(speculative_lane("aded", "greedy_match"))
    assembly.decoder.drafter = cls(prompt=False, gain=0.5)
    model = TableModel("abc", seed=3)
    lane = write(assembly, {"target": model}, [0, 1, 0, 2, 0, 1], Limits(0, 30), Draws(0))
    text = lane.tokens
    written = {tuple(text[i:i + 3]) for i in range(len(text) - 2)}
    grams = next(iter(lane._recalled.values())).known
    heaviest = max(weight for known in grams.values() for weight in known.values())
    assert (
        {(*pair_, token) for pair_, known in grams.items() for token in known} == written and heaviest <= 3.0
    ) == right
