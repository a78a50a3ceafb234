"""Sampling primitives against the library's processors, worked examples, and their statistics."""
from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from playground.contract import Sampler, discover, find
from playground.contract.lane_config import LaneConfig, assemble
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.rng import Draws
from playground.decoding.sampler_chain import Histories
from playground.engine import sampling

HAND = torch.tensor([[0.50, 0.30, 0.15, 0.05]], dtype=torch.float64).log()
SIZES = [2, 3, 50, 1000]


def kept(scores: torch.Tensor) -> set[int]:
    return set((scores[0] > -math.inf).nonzero().flatten().tolist())


def random_rows(size: int, rows: int = 25, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed + size)) * 3


# --- the library ---

PAIRS = {
    "temperature": (sampling.temperature, TemperatureLogitsWarper, [0.05, 0.7, 1.0, 2.0]),
    "top_k": (sampling.top_k, TopKLogitsWarper, [1, 2, 40, 1000, 5000]),
    "top_p": (sampling.top_p, TopPLogitsWarper, [0.01, 0.5, 0.9, 0.999, 1.0]),
    "min_p": (sampling.min_p, MinPLogitsWarper, [0.001, 0.05, 0.5, 1.0]),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ours, theirs, values", PAIRS.values(), ids=PAIRS)
def test_a_row_is_the_same_as_after_the_librarys_processor(ours, theirs, values, size):
    rows = random_rows(size)
    for value in values:
        assert torch.equal(ours(rows, value), theirs(value)(None, rows)), value


@pytest.mark.parametrize("penalty", [0.8, 1.2, 2.0])
@pytest.mark.parametrize("size", SIZES)
def test_a_penalised_row_is_the_same_as_the_librarys(size, penalty):
    history = torch.randint(size, (25, 7), generator=torch.Generator().manual_seed(size))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, random_rows(size))
    found = torch.stack(
        [sampling.repetition_penalty(row, past.tolist(), penalty) for row, past in zip(random_rows(size), history)]
    )
    assert torch.equal(found, expected)


def test_all_samplers_at_once_act_in_the_order_of_the_library():
    knobs = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3}
    history = [[3, 3, 9]] * 25
    expected = random_rows(50)
    for processor in (
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.05),
    ):
        expected = processor(torch.tensor(history), expected)
    found = random_rows(50)
    for sampler in assemble(LaneConfig("sample", knobs)).samplers:
        found = sampler.apply(found, history)
    assert torch.equal(found, expected)


CHAIN = {  # of the library, in its order
    ("repetition_penalty", "penalty", 1.3): RepetitionPenaltyLogitsProcessor(1.3),
    ("no_repeat_ngram", "n", 2): NoRepeatNGramLogitsProcessor(2),
    ("temperature", "t", 1.5): TemperatureLogitsWarper(1.5),
    ("top_h", "h", 0.95): TopHLogitsWarper(0.95),
    ("top_k", "k", 30): TopKLogitsWarper(30),
    ("top_p", "p", 0.95): TopPLogitsWarper(0.95),
    ("min_p", "m", 0.02): MinPLogitsWarper(0.02),
    ("typical", "mass", 0.9): TypicalLogitsWarper(0.9),
    ("epsilon", "epsilon", 0.03): EpsilonLogitsWarper(0.03),
    ("eta", "eta", 0.08): EtaLogitsWarper(0.08),
}


@pytest.mark.parametrize("seed", range(3))
def test_samplers_act_in_the_order_of_the_library_however_they_were_added(seed):
    added = [(name, {knob: value}) for name, knob, value in CHAIN]
    random.Random(seed).shuffle(added)
    history = [[3, 3, 9, 4, 3]] * 25
    expected = found = random_rows(50)
    for processor in CHAIN.values():
        before, expected = expected, processor(torch.tensor(history), expected)
        assert not torch.equal(before, expected), "a step that does nothing says nothing of its place"
    for sampler in assemble(LaneConfig("greedy", {}, added)).samplers:
        found = sampler.apply(found, history)
    assert torch.equal(found, expected)


@pytest.mark.strategy("top_p")
@pytest.mark.parametrize("scores, p, left", [
    ([0.0, 0.0, 0.0, 0.0], 0.45, {0, 1}),
    ([0.0, 1.0, 0.0, 0.0], 0.5, {0, 1}),
    ([0.0, 0.0, 2.0, 2.0], 0.0, {2}),
])
def test_ties_at_the_boundary_of_top_p_keep_the_lowest_ids(scores, p, left):
    rows = torch.tensor([scores])
    assert kept(sampling.top_p(rows, p)) == left
    assert len(left) == len(kept(TopPLogitsWarper(p)(None, rows))), "the library keeps as many, but not always these"


@pytest.mark.parametrize("place, left", [("before cuts", {0, 1, 2}), ("after cuts", {0, 1})])
def test_temperature_may_precede_or_follow_truncation(place, left):
    samplers = assemble(
        LaneConfig(
            "greedy", {}, [("temperature", {"t": 2.0, "place": place}), ("top_p", {"p": 0.79}), ("min_p", {"m": 0.01})]
        )
    ).samplers
    found = HAND
    for sampler in samplers:
        found = sampler.apply(found, [[]])
    assert kept(found) == left
    assert float(found[0, 0] - found[0, 1]) == pytest.approx(math.log(5 / 3) / 2)


def test_samplers_missing_from_the_library_have_a_defined_order():
    added = [
        "mirostat",
        "momentum",
        "top_k",
        "top_n_sigma",
        "temperature",
        "dry",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram",
    ]
    chain = [sampler.name for sampler in assemble(LaneConfig("greedy", {}, [(name, {}) for name in added])).samplers]
    assert chain == [
        "no_repeat_ngram",
        "frequency_penalty",
        "presence_penalty",
        "dry",
        "temperature",
        "top_n_sigma",
        "top_k",
        "mirostat",
        "momentum",
    ]


# --- by hand: p = (.50, .30, .15, .05) ---

@pytest.mark.parametrize("scores, left", [
    (sampling.top_k(HAND, 2), {0, 1}), (sampling.top_p(HAND, 0.79), {0, 1}), (sampling.top_p(HAND, 0.81), {0, 1, 2}),
    (sampling.min_p(HAND, 0.2), {0, 1, 2}), (sampling.min_p(HAND, 0.31), {0, 1}), (sampling.top_p(HAND, 0.0), {0}),
    (sampling.top_k(HAND, 0), {0, 1, 2, 3}), (sampling.min_p(HAND, 1.0), {0}), (sampling.temperature(HAND, 0.0), {0}),
])
def test_worked_examples_of_truncated_rows(scores, left):
    assert kept(scores) == left


def test_entropy_is_in_nats_and_counts_removed_tokens_as_nothing():
    assert float(sampling.entropy(HAND)) == pytest.approx(1.1421, abs=1e-4)
    assert float(sampling.entropy(sampling.top_k(HAND, 1))) == 0
    assert float(sampling.entropy(torch.zeros(1, 8))) == pytest.approx(math.log(8))


def test_a_repetition_penalty_divides_positive_and_multiplies_negative_scores():
    row = torch.tensor([2.0, -1.0, 0.5])
    assert sampling.repetition_penalty(row, [0, 1, 1], 1.2).tolist() == pytest.approx([1.6667, -1.2, 0.5], abs=1e-4)


def test_a_token_that_ties_with_the_kth_stays():
    assert kept(sampling.top_k(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), 2)) == {0, 1, 2}


@pytest.mark.parametrize("t", [1e-3, 1e-5, 1e-30, 1e-45, 0.0])
def test_the_lowest_temperatures_are_greedy_and_finite(t):
    p = sampling.temperature(torch.tensor([[90.0, 100.0, -100.0]]), t).softmax(-1)
    assert p.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    "alone", [lambda rows: sampling.top_p(rows, 0.0), lambda rows: sampling.temperature(rows, 0.0), sampling.greedy]
)
def test_of_two_equal_scores_the_lower_id_is_the_greedy_one(alone):
    assert kept(alone(torch.tensor([[0.0, 3.0, 3.0, 1.0]]))) == {1}


# --- properties of all rows ---

some_rows = st.lists(st.floats(-30, 30), min_size=2, max_size=12).map(
    lambda row: torch.tensor([row], dtype=torch.float64)
)
TRUNCATIONS = {"top_k": (sampling.top_k, 3), "top_p": (sampling.top_p, 0.6), "min_p": (sampling.min_p, 0.2)}
every_truncation = pytest.mark.parametrize("truncate, value", TRUNCATIONS.values(), ids=TRUNCATIONS)


@every_truncation
@settings(deadline=None, max_examples=60)
@given(rows=some_rows)
def test_a_truncation_keeps_the_best_token_and_changes_no_score(truncate, value, rows):
    left = truncate(rows, value)
    assert int(rows.argmax()) in kept(left)
    assert torch.equal(left[left > -math.inf], rows[left > -math.inf])


@every_truncation
@settings(deadline=None, max_examples=60)
@given(rows=some_rows, mask=st.lists(st.booleans(), min_size=12, max_size=12))
def test_a_token_that_was_removed_never_comes_back(truncate, value, rows, mask):
    masked = rows.masked_fill(torch.tensor(mask[:rows.shape[1] - 1] + [False]), -math.inf)
    assert kept(truncate(masked, value)) <= kept(masked)
    assert kept(truncate(masked, value))


@every_truncation
def test_ids_may_be_renamed_without_changing_what_is_kept(truncate, value):
    rows, order = random_rows(50), torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(truncate(rows[:, order], value), truncate(rows, value)[:, order])


@every_truncation
def test_a_row_does_not_depend_on_its_batch(truncate, value):
    rows = random_rows(50)
    assert torch.equal(truncate(rows, value), torch.cat([truncate(row[None], value) for row in rows]))


@pytest.mark.parametrize("truncate, value", [TRUNCATIONS["top_k"], TRUNCATIONS["min_p"]])
def test_truncating_twice_is_truncating_once(truncate, value):
    once = truncate(random_rows(50), value)
    assert torch.equal(truncate(once, value), once)


# --- randomness ---

@pytest.mark.slow
def test_samples_follow_the_distribution():
    p, draws, count = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05]), Draws(0), 20_000
    found = torch.bincount(torch.tensor([draws.pick(p, "token", position) for position in range(count)]), minlength=5)
    expected = p * count
    assert found[1] == 0
    chi_square = float(((found - expected) ** 2 / expected.clamp(min=1)).sum())
    assert (chi_square - 3) / math.sqrt(2 * 3) < 4


def test_random_choices_have_their_probability():
    draws = Draws(1)
    heads = sum(draws.flip(0.3, "accept", position)[0] for position in range(20_000))
    assert abs(heads - 6000) < 4 * math.sqrt(20_000 * 0.3 * 0.7)


def test_probabilities_zero_and_one_are_exact():
    draws = Draws(2)
    assert not any(draws.flip(0.0, "accept", position)[0] for position in range(1000))
    assert all(draws.flip(1.0, "accept", position)[0] for position in range(1000))
    assert {draws.pick(torch.tensor([0.0, 1.0, 0.0]), "token", position) for position in range(1000)} == {1}


def test_a_sample_depends_on_seed_purpose_position_and_count_only():
    first, again = Draws(3), Draws(3)
    asked = [("token", 1), ("accept", 1), ("token", 2), ("token", 1)]
    found = {key + (i,): first.uniform(*key) for i, key in enumerate(asked)}
    assert len(set(found.values())) == 4 and Draws(4).uniform("token", 1) not in found.values()
    assert [
        again.uniform("token", 2),
        again.uniform("token", 1),
        again.uniform("accept", 1),
        again.uniform("token", 1),
    ] == [found["token", 2, 2], found["token", 1, 0], found["accept", 1, 1], found["token", 1, 3]]


# --- large vocabularies: found by chunks, without an order ---

LONG = 9 * sampling.CHUNK + 77  # whole chunks and a rest


def long_rows(ties: bool, rows: int = 3) -> torch.Tensor:
    """Rows of a large vocabulary; with `ties` hundreds of tokens share each score."""
    scores = random_rows(LONG, rows)
    return scores.round() if ties else scores


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_largest_of_a_large_vocabulary_are_those_of_a_complete_order(count):
    scores = long_rows(ties=False)
    scores[0, -1] = 99.0  # after the last whole chunk
    values, indices = sampling.largest(scores, count)
    assert torch.equal(values, scores.topk(count).values) and torch.equal(indices, scores.topk(count).indices)
    values, indices = sampling.ranked(scores[1], count)
    ordered = scores[1].sort(descending=True, stable=True)
    assert torch.equal(values, ordered.values[:count]) and torch.equal(indices, ordered.indices[:count])


def test_of_equal_scores_the_first_token_counts_however_large_the_vocabulary():
    scores = long_rows(ties=True)
    scores[:, [700, 701, LONG - 1]] = 50.0
    assert sampling.first_largest(scores).tolist() == [[700]] * 3
    assert sampling.ranked(scores[0], 2).indices.tolist() == [700, 701]
    assert kept(sampling.greedy(scores)) == {700} == kept(sampling.top_p(scores, 0.0))


@pytest.mark.parametrize("p", [0.1, 0.6, 0.95])
def test_top_p_and_typical_of_a_large_vocabulary_are_the_librarys(p):
    scores = long_rows(ties=False)
    assert torch.equal(sampling.top_p(scores, p), TopPLogitsWarper(p)(None, scores))
    typical = assemble(LaneConfig("greedy", {}, [("typical", {"mass": p})])).samplers[0]
    assert torch.equal(typical.apply(scores, []), TypicalLogitsWarper(p)(None, scores))


def test_an_entropy_needs_no_logarithm_of_every_token():
    scores = random_rows(1000).double()
    scores[0, 5:], scores[1, 1:] = -math.inf, -math.inf
    entropies = torch.special.entr(scores.softmax(-1)).sum(-1)
    assert torch.allclose(sampling.entropy(scores), entropies) and float(sampling.entropy(scores)[1]) == 0
    assert torch.allclose(sampling.entropy_sum(scores.softmax(-1)), entropies)


def test_scores_at_temperature_one_are_not_copied():
    scores = random_rows(50)
    assert sampling.temperature(scores, 1.0) is scores


# --- rows without any token, which drafters read beyond the end of a grammar's text ---

SHAPING = [name for name, cls in discover().items()
           if cls.kind == "sampler" and cls.stage != "mix" and cls.consult is Sampler.consult]


@pytest.mark.parametrize("size", [64, 4096])
@pytest.mark.parametrize("name", SHAPING)
def test_a_row_in_which_no_token_is_allowed_stays_empty(name, size):
    row = torch.full((1, size), -torch.inf, dtype=torch.double)
    shaped = find(name)().apply(row, Histories([1, 2, 3], TokenTree(), [ROOT]))
    assert shaped.shape == row.shape and not (shaped > -torch.inf).any()


# --- what is left of the target's distribution after a draft token was rejected ---

def test_the_residual_is_what_p_has_more_than_q():
    p, q = ((torch.tensor(counts, dtype=torch.double) / 8) for counts in ([4, 3, 1, 0], [1, 5, 1, 1]))
    assert sampling.residual_distribution(p, q).tolist() == [1, 0, 0, 0]
    p = torch.tensor([3, 4, 1, 0], dtype=torch.double) / 8
    assert sampling.residual_distribution(p, q.roll(2)).tolist() == pytest.approx([0.4, 0.6, 0, 0], abs=1e-15)
    assert sampling.residual_distribution(p, p).tolist() == p.tolist()  # nothing is left, so p itself
