"""Samplers with their own random choices: exact distributions, reproducible runs, shared by lanes but not branches."""
from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from tables import Enumerating, Law, TableModel, distance, law, product_law, write

from playground.contract import Sampler, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.sampling import REMOVED
from support.laws import AT_ONE, EXACT, WRONG, off, tables

PROMPT, CHANCE = [0, 1, 0], 0.3
PLAIN = LaneConfig("greedy")
SPECULATION = LaneConfig("speculative", {}, [("draft_model", {"depth": 2}), ("rejection", {})])


class SometimesWithoutTheBest(Sampler):
    """With some probability it removes each row's most probable token, as XTC does."""

    def apply(self, scores, histories):
        rows = torch.tensor([self.flip(CHANCE, history) for history in histories])
        return torch.where(rows[:, None], without_best(scores), scores)


class FlipsTheWrongWay(SometimesWithoutTheBest):
    """Wrong: it inverts the random choice."""

    def flip(self, probability, history, purpose=""):
        return not super().flip(probability, history, purpose)


class BringsItsOwnChance(SometimesWithoutTheBest):
    """Wrong: another random generator is neither reproducible nor enumerable."""

    def flip(self, probability, history, purpose=""):
        return random.random() < probability


def without_best(scores: torch.Tensor) -> torch.Tensor:
    return scores.scatter(-1, scores.argmax(-1, keepdim=True), REMOVED)


def sampling(sampler: Sampler, config: LaneConfig = PLAIN) -> Assembly:
    assembly = assemble(config)
    assembly.samplers = [make(AT_ONE[0], **AT_ONE[1]), sampler]
    return assembly


def by_formula(model: TableModel, length: int) -> Law:
    """Each row is a mixture of two: with the best token, and without it."""

    def mixture(scores, history):
        return (CHANCE * without_best(scores[None])[0].softmax(-1) + (1 - CHANCE) * scores.softmax(-1)).log()

    return product_law(model, PROMPT, length, mixture)


# --- the law ---

@pytest.mark.parametrize("config", [PLAIN, SPECULATION], ids=["plain", "speculative"])
def test_the_distribution_of_a_random_sampler_is_a_mixture(config):
    found = law(sampling(SometimesWithoutTheBest(), config), tables("abc"), PROMPT, 2)
    assert distance(found, by_formula(TableModel("abc"), 2)) < EXACT


def test_the_guaranteed_distribution_includes_random_samplers():
    assert off(sampling(SometimesWithoutTheBest(), SPECULATION), tables("abc"), PROMPT, 2) < EXACT


def test_a_sampler_that_flips_the_wrong_way_is_refused():
    found = law(sampling(FlipsTheWrongWay()), tables("abc"), PROMPT, 2)
    assert distance(found, by_formula(TableModel("abc"), 2)) > WRONG


# --- reproducibility ---

def text(assembly: Assembly, seed: int = 0, forced: tuple[int, ...] = ()) -> list[int]:
    limits = Limits(seed, 24, forced=forced)
    return write(assembly, tables("abcdefgh"), PROMPT, limits, Draws(seed)).tokens[len(PROMPT):]


def test_the_same_seed_writes_the_same_text_and_another_seed_another():
    assert text(sampling(SometimesWithoutTheBest())) == text(sampling(SometimesWithoutTheBest()))
    assert text(sampling(SometimesWithoutTheBest())) != text(sampling(SometimesWithoutTheBest()), seed=1)


def test_a_sampler_with_chance_from_elsewhere_does_not_repeat():
    assert len({tuple(text(sampling(BringsItsOwnChance()))) for _ in range(8)}) > 1


def test_a_fork_along_its_own_text_repeats_its_random_choices():
    whole = text(sampling(SometimesWithoutTheBest()))
    for length in (1, 5, 12):
        assert text(sampling(SometimesWithoutTheBest()), forced=tuple(whole[:length])) == whole


def test_lanes_with_one_seed_share_their_random_choices():
    plain, greedy = Noting(5), Noting(5)
    write(sampling(SometimesWithoutTheBest()), tables("abcdefgh"), PROMPT, Limits(5, 24), plain)
    write(
        Assembly(make("greedy"), [SometimesWithoutTheBest()]), tables("abcdefgh", seed=3), PROMPT, Limits(5, 24), greedy
    )
    assert plain.answers == greedy.answers and len(plain.answers) == 24


def test_branches_of_a_lane_have_independent_random_choices():
    draws = Noting(5)
    write(
        sampling(SometimesWithoutTheBest(), LaneConfig("best_of_n", {"n": 3})),
        tables("abcdefgh"),
        PROMPT,
        Limits(5, 24),
        draws,
    )
    assert {lineage for _, lineage in draws.answers} == {0, 1, 2}


def test_outside_a_lane_a_random_sampler_is_refused():
    with pytest.raises(RuntimeError, match="sampler.chance"):
        SometimesWithoutTheBest().apply(torch.zeros(1, 3), [[0]])


class Noting(Draws):
    """Draws that record the random choices of samplers, by position and lineage."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.answers: dict[tuple[int, int], bool] = {}

    def coin(self, probability, purpose, history, lineage=0):
        answer = super().coin(probability, purpose, history, lineage)
        self.answers[len(history), lineage] = answer
        return answer


def test_one_history_gets_one_answer_for_every_caller():
    coin = partial(Draws(4).coin, CHANCE, "xtc/")
    histories = [[0] * n for n in range(60)]
    first = [coin(history) for history in histories]
    assert [coin(history) for history in reversed(histories)] == first[::-1]
    assert 0.1 < sum(first) / len(first) < 0.6


def test_lanes_with_one_seed_share_random_choices_even_if_their_texts_differ():
    answers = [[Draws(7).coin(0.5, "xtc/", [token] * n) for n in range(40)] for token in (1, 2)]
    assert answers[0] == answers[1]
    assert answers[0] != [Draws(8).coin(0.5, "xtc/", [1] * n) for n in range(40)]


def test_branches_have_independent_random_choices_and_the_first_those_of_the_lane():
    answers = [[Draws(7).coin(0.5, "xtc/", [1] * n, lineage) for n in range(40)] for lineage in range(3)]
    assert len(set(map(tuple, answers))) == 3


def test_random_choices_of_samplers_do_not_affect_token_samples():
    asked, plain = Draws(3), Draws(3)
    asked.coin(0.5, "token", [0, 0])
    assert asked.uniform("token", 2) == plain.uniform("token", 2)


def test_an_enumeration_covers_both_outcomes_consistently_per_history():
    draws, found = Enumerating(), []
    for _ in draws.runs():
        answers = [draws.coin(0.25, "xtc/", [1, 2]) for _ in range(3)]
        found.append((set(answers), draws.weight))
    assert found == [({True}, 0.25), ({False}, 0.75)]
