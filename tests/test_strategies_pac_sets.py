"""PAC prediction sets for code against a figure computed by hand, and wrong variants against the same check."""
from __future__ import annotations

import json
import math
import random
from fractions import Fraction
from itertools import combinations

import pytest

from playground.algorithms.programs.partial_programs import GRID
from playground.contract import Strategy, find
from playground.events import Commit, Done, Figure, Header, Note, Stamped
from playground.trace import Trace
from support.study_figures import figure
from support.wrong_variants import refused

PACSets = find("pac_sets")
CODE = "a = f(3) + 4\nb = a"


def smallest_threshold(starts: list[float], eps: float, delta: float) -> float:
    """The smallest tau of the grid that misses at most the largest k with P(Binomial(n, eps) <= k) <= delta."""
    n, p = len(starts), Fraction(eps)
    tails = [sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)) for k in range(n)]
    most = max(k for k, tail in enumerate(tails) if tail <= Fraction(delta))
    return min(tau for tau in [*GRID, 1.0] if sum(start > tau for start in starts) <= most)


def fewest_lost(costs: list[float], parents: list[int], tau: float, holes: int) -> int:
    """Fewest parts to remove, by trying every set of holes, so that the rest costs at most -log tau."""

    def under(part: int) -> set[int]:
        return {part}.union(*(under(child) for child, parent in enumerate(parents) if parent == part))

    found = len(costs)
    for count in range(holes + 1):
        for cut in combinations(range(len(costs)), count):
            lost = set().union(*map(under, cut))
            if sum(cost for part, cost in enumerate(costs) if part not in lost) <= -math.log(tau) + 1e-12:
                found = min(found, len(lost))
    return found


def letters_lane(seed: int) -> Trace:
    """A lane that wrote CODE letter by letter, with given log-probabilities."""
    chance = random.Random(seed)
    logprobs = [-chance.expovariate(0.4) for _ in CODE]
    commit = Commit(0, list(range(len(CODE))), list(CODE), CODE, logprobs, ["sampled"] * len(CODE))
    return Trace([Header(model="toy", revision="1")], [Stamped(0, 0, 0.0, commit), Stamped(0, 1, 0.0, Done())])


def parts_of_code(logprobs: list[float]) -> tuple[list[str], list[float], list[int]]:
    """Own texts, costs and parents of the parts of CODE, by hand: each letter belongs to one part."""
    own = ["", "=", "a", "+", "()", "f", "3", "4", "=", "b", "a"]
    places = [[], [2], [0], [9], [5, 7], [4], [6], [11], [15], [13], [17]]
    parents = [-1, 0, 1, 1, 3, 4, 4, 3, 0, 8, 8]
    return own, [sum(-logprobs[i] for i in place) for place in places], parents


def check_pac_sets(cls: type[Strategy]) -> None:
    chance = random.Random(0)
    for eps, delta, holes in ((0.1, 0.1, 1), (0.3, 0.05, 2), (0.3, 0.1, 3)):
        starts = [GRID[chance.randrange(0, 99, 3)] for _ in range(40)]
        calibration = {"model": "toy", "revision": "1", "about": "toys", "covered_from": [[s] * 4 for s in starts]}
        recorded = cls(eps=eps, delta=delta, holes=holes, calibration=json.dumps(calibration)).draw([letters_lane(1)])
        tau = smallest_threshold(starts, eps, delta)
        assert f"tau is {tau:.3g}," in next(event.text for event in recorded if isinstance(event, Note))
        covered = [
            event.data["series"]["covered"]
            for event in recorded
            if isinstance(event, Figure) and "covered" in event.name
        ]
        assert covered == [sum(start <= step for start in starts) / 40 for step in GRID]
    for seed, holes in ((2, 1), (2, 3), (5, 2)):  # at the smallest tau nothing was removed before
        lane = letters_lane(seed)
        table = figure(cls(holes=holes, tau=GRID[0], calibration=json.dumps(calibration)).draw([lane]), "parts")
        own, costs, parents = parts_of_code(lane.events[0].event.logprobs)
        costs = [min(cost, 10.0) for cost in costs]
        assert [row.partition(" ")[2] for row in table["rows"]] == own[1:]
        assert [cost for cost, _ in table["values"]] == pytest.approx(costs[1:])
        lost = sum(not stays for _, stays in table["values"])
        assert lost == min(fewest_lost(costs, parents, GRID[0], holes), len(costs) - 1)


class MissesTheShareItself(PACSets):
    """Lets a share eps of the calibration fail, as if it were all programs."""

    def _threshold(self, calibration):
        starts = sorted(calibration.thresholds(self.holes), reverse=True)
        return starts[int(self.eps * len(starts))]


class CoversStrictly(PACSets):
    def _coverage(self, calibration):
        recorded = super()._coverage(calibration)
        starts = calibration.thresholds(self.holes)
        for step, event in zip(GRID, recorded):
            event.data["series"]["covered"] = sum(start < step for start in starts) / len(starts)
        return recorded


class OneHoleMore(PACSets):
    def _lane(self, *about):
        self.holes += 1
        return super()._lane(*about)


@pytest.mark.oracle("pac_sets")
def test_pac_sets_take_the_smallest_threshold_and_remove_the_fewest_parts():
    check_pac_sets(PACSets)


@pytest.mark.refuses("pac_sets")
@pytest.mark.parametrize("wrong", [MissesTheShareItself, CoversStrictly, OneHoleMore])
def test_wrong_pac_sets_are_refused(wrong):
    refused(check_pac_sets, wrong)
