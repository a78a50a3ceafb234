"""STAND: remembered probabilities: its tree against one by hand, and wrong variants against the same check."""
from __future__ import annotations

from collections import defaultdict
from itertools import permutations

import pytest
import torch
from drafting_runs import constant, passes, recorded, recording_rejections
from tables import Enumerating, TableModel, distance, watch, write

from playground.algorithms.speculative.verification import reject
from playground.contract import Drafter, find, make
from playground.contract.lane_config import assemble
from playground.contract.token_tree import ROOT
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.decoding.visitor_memory import Memory
from playground.engine.sampling import largest
from playground.events import Verdict
from support.laws import AT_ONE, EXACT, WRONG
from support.speculation import Judged, collapses, off, speculative_lane
from support.speculation_oracles import NAMES, Recording, assert_refused, speculation


def remembered_row(rows: dict[tuple, list[torch.Tensor]], text: list[int], orders: int) -> torch.Tensor | None:
    """Mean of the rows after the longest known suffix."""
    known = (rows[tuple(text[-n:])] for n in range(orders, 0, -1) if tuple(text[-n:]) in rows)
    return next((torch.stack(found).mean(0) for found in known), None)


def check_stand(drafter: type[Drafter]) -> None:
    """Every q is the mean of the rows after the same suffix; wherever one is known there is a draft."""
    model, seen, rows, orders = TableModel("abc", seed=2), Recording(make("rejection")), defaultdict(list), 2
    assembly = speculation(drafter(nodes=6, orders=orders), seen, AT_ONE)
    write(assembly, {"target": model}, [0, 1], Limits(0, 40), Draws(0))
    drafted = 0
    for text, tree, verdict in seen.rounds[:-1]:
        assert bool(len(tree)) == (remembered_row(rows, text, orders) is not None)
        for node, parent in enumerate(tree.parents):
            assert torch.allclose(tree.q[node], remembered_row(rows, text + tree.prefix(parent), orders))
            drafted += 1
        for node in (ROOT, *verdict.kept):
            context = text + tree.prefix(node)
            for n in range(1, orders + 1):
                rows[tuple(context[-n:])].append(model.scores(tuple(context)).softmax(-1))
    assert drafted > 20


class LearnsWhatWasRejected(find("stand")):
    def observe(self, tree, rows, verdict):
        super().observe(tree, rows, Verdict(kept=list(range(len(tree)))))


class AsksTheShortestEnding(find("stand")):
    def propose(self, lm, budget):
        self.orders, orders = 1, self.orders
        tree = yield from super().propose(lm, budget)
        self.orders = orders
        return tree


class RemembersTheLastRow(find("stand")):
    """Replaces the stored row of a suffix instead of averaging."""

    def observe(self, tree, rows, verdict):
        for node in (ROOT, *verdict.kept):
            context = rows.committed[-self.orders:] + tree.prefix(node)
            p = self._final(rows, node)
            top = largest(p, min(self.stored, len(p)))
            likely = dict(zip(top.indices.tolist(), top.values.tolist()))
            for n in range(1, self.orders + 1):
                self._memory.known[tuple(context[-n:])] = (likely, 1)


@pytest.mark.oracle("stand")
def test_stand_samples_drafts_from_the_mean_of_all_rows_after_a_suffix():
    check_stand(find("stand"))


@pytest.mark.refuses("stand")
@pytest.mark.parametrize("wrong", [LearnsWhatWasRejected, AsksTheShortestEnding, RemembersTheLastRow], ids=NAMES)
def test_a_wrong_row_memory_is_detected(wrong):
    assert_refused(check_stand, wrong)


COLLAPSES = {"stand": collapses("stand", nodes=0)}
stand = __import__(find("stand").__module__, fromlist=["NGramDistributions"])


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
