"""Programs with holes: parts and their costs, optimal pruning against brute force, and the guarantee of a calibration.
"""
from __future__ import annotations

import json
import random
from fractions import Fraction
from itertools import combinations
from math import comb, exp, inf, log
from time import thread_time

import pytest
from calibrate import pairs

import playground
from playground.algorithms.programs.partial_programs import (
    GRID,
    HOLE,
    WHOLE,
    Calibration,
    Program,
    allowed,
    calibrated,
    covered_from,
    covers,
    cuts,
    drawn,
    parse,
    price,
    written,
)
from playground.contract import make
from playground.decoding.models import Models
from playground.errors import Refusal
from playground.events import Commit, Done, Figure, Header, Note, Stamped
from playground.trace import Trace

CODE = 'def work(items):\n    """Add."""\n    items = [x * 3 for x in items]\n    return sum(items) + 1'


def tree(parents: list[int], costs: list[float], own: list[str] | None = None) -> Program:
    return Program("", parents, own or [f"part {i}" for i in range(len(parents))], [[]] * len(parents), costs)


def grown(chance: random.Random, parts: int) -> Program:
    """A random tree whose parts mostly have low costs."""
    return tree(
        [-1, *(chance.randrange(i) for i in range(1, parts))],
        [0.0, *(chance.expovariate(2.0) for _ in range(1, parts))],
    )


# --- parts ---

def test_own_texts_cover_every_character_of_a_program_once_except_spaces():
    program = parse(CODE)
    places = sorted(place for part in program.places for place in part)
    assert places == [i for i, letter in enumerate(CODE) if not letter.isspace()]
    assert "*" in program.own and "3" in program.own and "sum" in program.own
    product = program.own.index("*")
    assert [program.own[child] for child in program.children[product]] == ["x", "3"]


def test_letters_of_several_bytes_are_shown_in_place():
    program = parse('é = "größe"\nß = é + é')
    assert sorted("".join(own) for own in program.own if own) == sorted(["=", "é", '"größe"', "=", "ß", "+", "é", "é"])


@pytest.mark.parametrize("text", ["def work(", "a b", "x = 1\r\ny = 2"])
def test_invalid_programs_have_no_parts(text):
    assert parse(text) is None


def test_tokens_that_belong_to_one_part_each_cost_what_the_text_costs():
    pieces, logprobs = [" x", " =", " f", "(", "3", ")"], [-0.5, -0.25, -1.0, -0.125, -2.0, -0.0625]
    program = parse("x = f(3)")
    price(program, pieces, logprobs, skipped=1)
    assert dict(zip(program.own, program.costs)) == pytest.approx(
        {"": 0, "=": 0.25, "x": 0.5, "()": 0.1875, "f": 1.0, "3": 2.0}
    )
    assert sum(program.costs) == pytest.approx(-sum(logprobs))


def test_a_token_that_two_parts_touch_counts_for_both_and_no_part_costs_more_than_ten():
    program = parse("x=y")
    price(program, ["x=", "y"], [-2.0, -80.0])
    assert dict(zip(program.own, program.costs)) == {"": 0, "=": 2.0, "x": 2.0, "y": 10.0}


# --- pruning ---

def closed(program: Program, holes: int):
    """Every set of parts that is closed under parents and leaves at most this many holes."""
    parts = range(len(program.parents))
    for count in range(len(program.parents) + 1):
        for kept in map(set, combinations(parts, count)):
            if all(program.parents[part] in kept for part in kept if part) and sum(
                    part not in kept and (part == 0 or program.parents[part] in kept) for part in parts) <= holes:
                yield kept


def kept_by(program: Program, cut) -> set[int]:
    return set(range(len(program.parents))) - {part for hole in cut for part in program.under(hole)}


@pytest.mark.oracle("pac_sets")
@pytest.mark.parametrize("holes", [1, 2, 3])
def test_no_other_pruning_within_the_budget_removes_fewer_parts(holes):
    chance = random.Random(holes)
    for _ in range(25):
        program, tau = grown(chance, chance.randrange(1, 9)), chance.uniform(0.01, 0.99)
        [cut] = cuts(program, holes, (tau,))
        kept = kept_by(program, cut)
        assert len(cut) <= holes and sum(program.costs[part] for part in kept) <= -log(tau) + 1e-9
        assert len(kept) == max(
            len(other) for other in closed(program, holes) if sum(program.costs[part] for part in other) <= -log(tau)
        )


def test_removed_parts_are_nested_over_thresholds():
    chance, shrinking = random.Random(5), 0
    for _ in range(20):
        program = grown(chance, 14)
        kept = [kept_by(program, cut) for cut in cuts(program, 2)]
        assert all(later <= earlier for earlier, later in zip(kept, kept[1:]))
        shrinking += len(set(map(len, kept))) > 3
    assert shrinking > 10


def test_solving_each_threshold_by_itself_is_not_nested():
    chance = random.Random(5)
    alone = [
        [kept_by(program, cuts(program, 2, (tau,))[0]) for tau in GRID]
        for program in (grown(chance, 14) for _ in range(20))
    ]
    assert any(not later <= earlier for kept in alone for earlier, later in zip(kept, kept[1:]))


def test_without_costs_nothing_is_removed_and_with_high_costs_everything():
    free, dear = parse(CODE), parse(CODE)
    free.costs, dear.costs = [0.0] * len(free.own), [10.0] * len(dear.own)
    assert set(cuts(free, 3)) == {frozenset()} and cuts(dear, 1)[0] != frozenset()
    assert covers(free, frozenset(), parse(CODE)) and not covers(free, frozenset(), parse(CODE.replace("3", "4")))
    assert covers(dear, frozenset([0]), parse("pass")) and covers(dear, frozenset([0]), None)


def test_a_different_name_is_covered_inside_a_hole_only():
    program = parse(CODE)
    hole = frozenset([program.own.index("*")])
    assert covers(program, hole, parse(CODE.replace("x * 3", "x // 7 + 1")))
    assert not covers(program, hole, parse(CODE.replace("sum", "max"))) and not covers(program, hole, None)
    assert drawn(program, hole).splitlines()[2].replace(" ", "") == f"items=[{HOLE}forxinitems]"


# --- calibration ---

@pytest.mark.oracle("pac_sets")
def test_the_number_of_allowed_misses_follows_the_binomial_distribution():
    assert [allowed(n, 0.1, 0.1) for n in (21, 22, 37, 38, 100)] == [None, 0, 0, 1, 5]
    for n in (10, 33, 70):
        for eps, delta in ((0.05, 0.1), (0.3, 0.01), (0.5, 0.2)):
            share = Fraction(eps)
            tails = [sum(comb(n, i) * share ** i * (1 - share) ** (n - i) for i in range(k + 1)) for k in range(n + 1)]
            expected = max((k for k, tail in enumerate(tails) if tail <= Fraction(delta)), default=None)
            assert allowed(n, eps, delta) == expected


def world(count: int) -> list[float]:
    """The threshold from which each of many true programs is covered: a part differs with probability 1 -
    exp(-cost).
    """
    chance, found = random.Random(11), []
    for _ in range(count):
        program = grown(chance, 10)
        own = [name if chance.random() < exp(-cost) else "other" for name, cost in zip(program.own, program.costs)]
        found.append(covered_from(program, tree(program.parents, [], own), 2))
    return found


@pytest.fixture(scope="module")
def population() -> list[float]:
    return world(1500)


def failures(population: list[float], misses: int | None, eps: float, n: int, calibrations: int = 1000) -> float:
    """Share of calibrations of n programs whose threshold misses more than eps of all programs."""
    chance, failed = random.Random(1), 0
    for _ in range(calibrations):
        tau = calibrated(chance.choices(population, k=n), misses)
        failed += sum(start > tau for start in population) / len(population) > eps
    return failed / calibrations


@pytest.mark.parametrize("eps, n", [(0.2, 40), (0.3, 60)])
def test_a_calibration_fails_at_most_as_often_as_stated(population, eps, n):
    """1000 calibrations: three standard errors of a share of 0.1 are 0.03."""
    assert 0.0 < failures(population, allowed(n, eps, 0.1), eps, n) < 0.1 + 0.03


@pytest.mark.refuses("pac_sets")
def test_allowing_a_share_eps_of_misses_fails_far_too_often(population):
    assert failures(population, int(0.2 * 40), 0.2, 40) > 0.3


def test_coverage_is_lost_under_distribution_shift(population):
    tau = calibrated(population[:100], allowed(100, 0.2, 0.1))
    worse = [min(WHOLE, start * 2 + 0.3) for start in population]
    assert sum(start > tau for start in worse) / len(worse) > 0.2


def test_the_threshold_is_the_smallest_that_misses_so_few():
    starts = [GRID[10], GRID[20], GRID[30], WHOLE]
    assert [calibrated(starts, misses) for misses in range(4)] == [WHOLE, GRID[30], GRID[20], GRID[10]]


# --- the study ---

def lane(text: str, logprob: float = -0.1) -> Trace:
    """A lane that wrote a program letter by letter, with lower probabilities for numbers."""
    logprobs = [-6.0 if letter.isdigit() else logprob / 100 for letter in text]
    commit = Commit(0, list(range(len(text))), list(text), text, logprobs, ["sampled"] * len(text))
    return Trace(
        [Header(strategy="greedy", model="toy", revision="1")], [Stamped(0, 0, 0.0, commit), Stamped(0, 1, 0.0, Done())]
    )


def calibration(starts: list[float], model: str = "toy") -> str:
    return json.dumps(
        {"model": model, "revision": "1", "about": "toys", "covered_from": [[start] * 4 for start in starts]}
    )


def test_uncertain_parts_become_holes():
    study = make("pac_sets", eps=0.1, calibration=calibration([GRID[40]] * 30))
    drawing = study.draw([lane(f" {CODE}")])
    notes = [event.text for event in drawing if isinstance(event, Note)]
    assert f"sum(items) + {HOLE}" in notes[-1] and f"x * {HOLE}" in notes[-1] and "another model" not in notes[-1]
    parts = next(event.data for event in drawing if isinstance(event, Figure) and event.shape == "matrix")
    lost = [row for row, (_, stays) in zip(parts["rows"], parts["values"]) if not stays]
    assert {row.split()[1] for row in lost} == {"3", "1"}


def test_a_text_that_is_no_program_is_one_hole_and_another_model_is_named():
    study = make("pac_sets", calibration=calibration([GRID[40]] * 30, "other"))
    [*_, note] = study.draw([lane(CODE), lane("def def")])
    assert "all of it is one hole" in note.text and "with another model, other" in note.text
    with pytest.raises(Refusal, match="None of these texts"):
        study.draw([lane("def def")])


def test_too_few_programs_are_refused_with_the_number_that_is_needed():
    with pytest.raises(Refusal, match="3 programs are too few for a guarantee: 22 are needed"):
        make("pac_sets", eps=0.1, delta=0.1, calibration=calibration([0.5] * 3)).draw([lane(CODE)])
    with pytest.raises(Refusal, match="not a calibration"):
        make("pac_sets", calibration="{}").draw([lane(CODE)])


def test_the_bundled_calibration_has_a_threshold_for_every_number_of_holes():
    for holes in range(1, 5):
        drawing = make("pac_sets", holes=holes).draw([lane(CODE)])
        shares = [
            event.data["series"]["covered"] for event in drawing
            if isinstance(event, Figure) and event.shape == "scalar"
        ]
        assert shares == sorted(shares) and len(shares) == len(GRID) and "may be missed" in drawing[0].text
    thresholds = [Calibration.read("").thresholds(holes) for holes in range(1, 5)]
    assert len(thresholds[0]) >= 22 and all(0 < start <= WHOLE for column in thresholds for start in column)


@pytest.mark.slow
def test_a_calibration_is_made_of_lanes_and_read_again():
    models: Models = playground.load()
    made = Calibration.of(pairs(models, 2, 3), "two programs", 2)
    assert Calibration.read(made.json()) == made and made.model == models.target.name
    assert len(made.covered_from) == 2 and all(len(row) == 2 for row in made.covered_from)
    with pytest.raises(Refusal, match="no program to calibrate with"):
        Calibration.of([], "none", 2)


def test_costs_are_the_lanes_own_log_probabilities():
    program = written(lane(f"  {CODE}\n"))
    costs = {own: cost for own, cost in zip(program.own, program.costs) if own in ("3", "sum")}
    assert costs == pytest.approx({"3": 6.0, "sum": 0.003}) and inf not in program.costs


HOSTILE = {
    "a long chain": ("x = " + "+".join(["'" + "a" * 15 + "'"] * 900), True),
    "many lines": ("x=1\n" * 4900, True),
    "a long line": ("x=[" + "1," * 9000 + "]", True),
    "too many branches": ("if a: b\n" + "elif a: b\n" * 1500, False),
    "too many indices": ("x" + "[0]" * 3000, False),
    "too many signs": ("-" * 15_000 + "1", False),
    "too many brackets": ("(" * 9000, False),
    "too many characters": ("x=1\n" * 5001, False),
}


@pytest.mark.parametrize("text, is_program", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_program_is_parsed_in_time_or_is_none(text, is_program):
    seconds = []
    for _ in range(2):  # a garbage collection of all that the process holds may fall into one
        start = thread_time()
        assert (parse(text) is not None) == is_program
        seconds.append(thread_time() - start)
    assert min(seconds) < 1.5
