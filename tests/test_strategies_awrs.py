"""AWRS: rejection sampling of allowed tokens, with unbiased weights."""
from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import accumulate

import pytest
import torch
from tables import Enumerating, TableModel, distance, write

from playground.contract import Constraint, find, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.events import Figure, Note
from playground.grammar.matcher import Matcher
from strategies.constrained.awrs import token_rejection as rejections
from strategies.constrained.awrs.token_rejection import Tries, counting, first_legal, recursive
from support.byte_grammars import TOKENIZER
from support.laws import EXACT, WRONG
from support.particles import SKEWED, coins, legal_chances, steered, weighed_law, zeros

# --- rejections: E[weight, if v was taken] = p(v) for each allowed v ---

P = torch.tensor([0.4, 0.05, 0.25, 0.0, 0.2, 0.1], dtype=torch.float64)
LEGAL = {"some": {1, 3, 4}, "all": set(range(6)), "one": {1}, "the favourite": {0}}


def weighed(way, p: torch.Tensor, legal: set[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Exact E[weight, if v was taken] and P(v was taken), over every random outcome."""
    draws, mass, law = Enumerating(), defaultdict(float), defaultdict(float)
    for _ in draws.runs():
        token, weight = way(Tries(p, legal.__contains__, lambda q: draws.pick(q, "try", 0)))
        mass[token] += draws.weight * weight
        law[token] += draws.weight
    return dict(mass), dict(law)


PATIENT = pytest.mark.parametrize("patience", [1, 2, rejections.PATIENCE])


@PATIENT
@pytest.mark.oracle("awrs")
@pytest.mark.parametrize("legal", LEGAL.values(), ids=LEGAL)
def test_the_recursive_estimate_is_exact_on_average_for_every_token(legal, patience, monkeypatch):
    """Also where the whole vocabulary is checked after a rejection or two."""
    monkeypatch.setattr(rejections, "PATIENCE", patience)
    mass, law = weighed(recursive, P, legal)
    wanted = {v: float(P[v]) for v in legal if P[v] > 0}
    assert distance({v: m for v, m in mass.items() if m}, wanted) < EXACT
    assert (
        distance(
            {v: q for v, q in law.items() if v is not None}, {v: p / sum(wanted.values()) for v, p in wanted.items()}
        )
        < EXACT
    )


def test_if_all_tokens_are_allowed_the_weight_is_one_after_two_trials():
    tries = Tries(P, lambda token: True, lambda q: Draws(1).pick(q, "try", 0))
    assert recursive(tries)[1] == 1.0 and len(tries.asked) == 2


def one_over_the_tries(tries: Tries):
    token, _ = first_legal(tries)
    return token, 1 / len(tries.asked) if token is not None else 0.0


def forgets_what_is_gone(tries: Tries):
    """q of the whole distribution, not of the remaining tokens."""
    token, weight = recursive(tries)
    refused = [float(tries.p[v]) for v, ok in tries.asked.items() if not ok]
    return token, weight and math.prod(1 - p for p in refused)


@pytest.mark.refuses("awrs")
@pytest.mark.parametrize("wrong", [first_legal, one_over_the_tries, forgets_what_is_gone])
def test_wrong_weights_are_detected(wrong):
    mass, _ = weighed(wrong, P, LEGAL["some"])
    assert distance({v: m for v, m in mass.items() if m}, {1: 0.05, 4: 0.2}) > WRONG


def drawn(way, p: torch.Tensor, legal: set[int], times: int, seed: int) -> list[tuple[int | None, float, int]]:
    """Token, weight and number of trials of many samples."""
    chance, found, values = random.Random(seed), [], list(range(len(p)))
    for _ in range(times):
        tries = Tries(p, legal.__contains__, lambda q: chance.choices(values, q.tolist())[0])
        found.append((*way(tries, chance.random), len(tries.asked)))
    return found


def counts(accepts: int, most: int = 10**6):
    return lambda tries, uniform: counting(tries, uniform, accepts, most)


def off_by(found: list, p: torch.Tensor, legal: set[int]) -> float:
    """Largest deviation of E[weight, if v was taken] from p(v), in standard errors."""
    errors = []
    for v in range(len(p)):
        values = torch.tensor([weight if token == v else 0.0 for token, weight, _ in found], dtype=torch.float64)
        wanted = float(p[v]) if v in legal else 0.0
        errors.append(abs(float(values.mean()) - wanted) / max(float(values.std()) / math.sqrt(len(found)), 1e-12))
    return max(errors)


@pytest.mark.slow
@pytest.mark.oracle("awrs")
@pytest.mark.parametrize("patience", [1, rejections.PATIENCE])
@pytest.mark.parametrize("accepts, most", [(2, 10**6), (4, 10**6), (2, 3), (3, 1)])
def test_counts_are_unbiased_within_four_standard_errors(accepts, most, patience, monkeypatch):
    """12,000 samples: a bias of 4 % of the mass would be detected."""
    monkeypatch.setattr(rejections, "PATIENCE", patience)
    legal = LEGAL["some"]
    assert off_by(drawn(counts(accepts, most), P, legal, 12_000, seed=accepts), P, legal) < 4


@pytest.mark.slow
@pytest.mark.refuses("awrs")
@pytest.mark.parametrize("wrong", ["counts no refused token twice", "counts the last that passed"])
def test_the_same_test_detects_wrong_counts(wrong, monkeypatch):
    if wrong == "counts no refused token twice":
        monkeypatch.setattr(rejections, "_again", lambda share, uniform: 0)
        way = counts(2)
    else:
        def way(tries, uniform):
            token, weight = counting(tries, uniform, 2, 10**6)
            return token, 2 / (1 / weight + 1)
    assert off_by(drawn(way, P, LEGAL["some"], 12_000, seed=2), P, LEGAL["some"]) > 6


@pytest.mark.slow
def test_requiring_more_accepted_tokens_lowers_variance_and_costs_trials():
    """For a uniform row, of which a sixth is allowed."""
    flat = torch.full((12,), 1 / 12, dtype=torch.float64)
    found = [
        drawn(way, flat, {3, 7}, 6000, seed=5)
        for way in (lambda tries, uniform: recursive(tries), counts(2), counts(4))
    ]
    spread = [float(torch.tensor([weight for _, weight, _ in draws]).var()) for draws in found]
    tried = [sum(count for *_, count in draws) for draws in found]
    assert spread[2] < spread[1] and tried[2] > tried[1] > 0 and spread[2] < spread[0]


@pytest.mark.parametrize(
    "way", [counts(2), counts(8), lambda tries, uniform: recursive(tries), lambda tries, uniform: first_legal(tries)]
)
def test_without_allowed_tokens_each_is_tried_once_and_the_weight_is_zero(way):
    assert drawn(way, P, set(), 3, seed=0) == [(None, 0.0, 5)] * 3


def test_one_allowed_token_among_many_is_found_without_thousands_of_draws():
    p, draws = torch.full((4000,), 1 / 4000, dtype=torch.float64), []
    found = recursive(Tries(p, lambda token: token == 3999, lambda q: draws.append(q) or Draws(1).pick(q, "try", 0)))
    assert found[0] == 3999 and len(draws) <= rejections.PATIENCE + 1
    assert found[1] == pytest.approx(1 / 4000)


# --- the strategy ---

@pytest.mark.oracle("awrs")
@pytest.mark.parametrize("threshold", [0.0, 1.0])
@pytest.mark.parametrize("particles", [1, 2])
def test_weighted_answers_are_unbiased_estimates_of_the_models_probabilities(particles, threshold):
    found = weighed_law(
        LaneConfig("awrs", {"particles": particles, "threshold": threshold, "estimate": "recursive"}, [SKEWED]),
        coins(2, 0.3),
    )
    assert distance(found, legal_chances(0.3)) < EXACT


@pytest.mark.refuses("awrs")
def test_dropping_the_weights_of_a_population_is_detected(monkeypatch):
    monkeypatch.setattr(find("awrs"), "_tried", lambda self, tries, uniform: first_legal(tries))
    found = weighed_law(LaneConfig("awrs", {"particles": 2, "threshold": 1.0}, [SKEWED]), coins(2, 0.3))
    assert distance(found, legal_chances(0.3)) > WRONG


@pytest.mark.slow
def test_one_particle_equals_a_plain_mask_and_more_weighted_ones_approach_the_model():
    """A mask gives 1/2, the model's own distribution 1/3."""
    assert zeros_of(1, 0.0, weights=False) == pytest.approx(1 / 2) == zeros(1, 0.0)
    assert 1 / 3 < zeros_of(2, 0.0) < 0.49


def zeros_of(particles: int, threshold: float, **knobs) -> float:
    """Probability of the answer 00 among the allowed answers of two fair coins."""
    config, draws, found = (
        LaneConfig(
            "awrs", {"particles": particles, "threshold": threshold, "estimate": "recursive", **knobs}, [SKEWED]
        ),
        Enumerating(),
        0.0,
    )
    for _ in draws.runs():
        text = steered(config, coins(2), draws).text
        found += draws.weight * (text == "00")
    return found


@pytest.mark.slow
def test_with_many_texts_the_answer_follows_the_model_given_the_grammar():
    """00000 or 1 and four more of a fair coin: a mask says 1/2, the model 1/17. 120 answers of 64 texts, counted: a
    share above 0.2 has no chance.
    """
    skewed = ("regex", {"pattern": "0{5}|1[01]{4}"})
    lanes = [steered(LaneConfig("awrs", {"particles": 64}, [skewed]), coins(5), Draws(seed)) for seed in range(12)]
    assert sum(lane.text == "00000" for lane in lanes) <= 3
    assert all(lane.text == "00000" or lane.text[0] == "1" and len(lane.text) == 5 for lane in lanes)


def test_if_all_tokens_are_allowed_all_texts_count_and_nothing_is_rejected():
    lane = steered(
        LaneConfig("awrs", {"particles": 5, "threshold": 1.0}, [("regex", {"pattern": "[01]{3}"})]), coins(3), Draws(0)
    )
    effective = [
        event.data["series"]["effective sample size"]
        for event in lane.recorded
        if isinstance(event, Figure) and event.name == "effective sample size"
    ]
    refused = [
        event.data["series"]["refused"]
        for event in lane.recorded
        if isinstance(event, Figure) and event.name.startswith("tries")
    ]
    assert effective == pytest.approx([5.0] * 4) and refused == [0.0] * 4


class Balanced:
    """A black box: balanced brackets, at most three deep. It counts its calls."""

    def __init__(self):
        self.asked = 0

    def __deepcopy__(self, memo: dict) -> Balanced:
        return self

    def viable(self, text: bytes) -> bool:
        self.asked += 1
        depths = list(accumulate(1 if byte == ord("(") else -1 for byte in text))
        return set(text) <= set(b"()") and all(0 <= depth <= 3 for depth in depths)

    def complete(self, text: bytes) -> bool:
        self.asked += 1
        return text.count(b"(") == text.count(b")")


class Brackets(Constraint):
    """Has no grammar; without a name it is not registered."""

    def __init__(self, box: Balanced):
        self.box = box

    def checker(self):
        return self.box


def brackets(context: tuple[int, ...]) -> torch.Tensor:
    """Mostly brackets with equal probability, the end after six at the earliest, and little of everything else."""
    row = torch.full((len(TOKENIZER),), math.log(1e-4), dtype=torch.float64)
    row[TOKENIZER.convert_tokens_to_ids(list("()"))] = math.log(0.45)
    row[TOKENIZER.eos_token_id] = math.log(0.5 if len(context) > 6 else 1e-9)
    return row


def boxed(name: str, seed: int = 0, **knobs):
    """A lane constrained by the black box, and the box."""
    box, decoder = Balanced(), make(name, **knobs)
    toggles = [*decoder.toggles(), Brackets(box)]
    model = TableModel(tokenizer=TOKENIZER, rule=brackets)
    samplers = [part for part in toggles if part.kind == "sampler"]
    return write(Assembly(decoder, samplers, constraint=toggles[-1]), {"target": model}, [5], Limits(seed, 24),
                 Draws(seed)), box


def tried(lane) -> float:
    """Tokens checked in all texts of a lane."""
    return sum(event.data["series"]["tokens tried"] for event in lane.recorded
               if isinstance(event, Figure) and event.name.startswith("tries"))


def test_awrs_computes_no_mask_and_reports_its_checks(monkeypatch):
    checked, inner = [], Matcher.allows
    monkeypatch.setattr(Matcher, "allows", lambda self, token: checked.append(token) or inner(self, token))
    monkeypatch.setattr(Matcher, "bitmask", lambda self: pytest.fail("a mask was computed"))
    lane = steered(LaneConfig("awrs", {"particles": 1}, [("regex", {"pattern": "1[01]{5}"})]), coins(6), Draws(0))
    assert len(lane.main.written) == 7 and len(checked) == tried(lane)
    assert len(checked) < 30 < lane.vocabulary


def test_awrs_checks_few_tokens_of_a_black_box_where_a_mask_checks_all():
    lane, box = boxed("awrs", particles=1)
    assert Balanced().complete(lane.text.encode()) and Balanced().viable(lane.text.encode()) and lane.reason == "end"
    assert box.asked < 6 * len(lane.main.written)
    masked, asked = boxed("sample", temperature=1.0, top_p=1.0)
    assert Balanced().complete(masked.text.encode()) and asked.asked > 300 * len(masked.main.written)


@pytest.mark.parametrize("name, knobs", [("greedy", {}), ("smc", {"particles": 3}), ("beam_search", {"beams": 2})])
def test_every_decoder_supports_a_black_box_constraint(name, knobs):
    lane, _ = boxed(name, **knobs)
    assert Balanced().viable(lane.text.encode())
    assert lane.reason == "length" or Balanced().complete(lane.text.encode())


def test_rejected_and_accepted_tokens_are_reported():
    lane = steered(LaneConfig("awrs", {"particles": 6}, [("regex", {"pattern": "1[01]"})]), coins(2), Draws(0))
    notes = [event.text for event in lane.recorded if isinstance(event, Note) and "tries of" in event.text]
    assert notes and all("refused '0'" in note and "passed '1'" in note for note in notes)
