"""Studies and variants: their reports, recomputed from the definitions, and the results of training.

Every strategy has one `check_...(cls)`, written without its code. The strategy passes it, and subclasses with one
mistake fail it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations

import numpy
import pytest
import torch
from toys import network
from transformers import PreTrainedModel

from playground.algorithms.programs.partial_programs import GRID
from playground.contract import Strategy, find
from playground.events import Commit, Done, Draft, Figure, Forward, Header, Note, Stamped, Verdict
from playground.trace import Trace

Hyperfitting, PACSets, ScalingLaws = (find(name) for name in ("hyperfitting", "pac_sets", "scaling_laws"))


def refused(check: Callable, wrong: type[Strategy]) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


def figure(recorded: list, name: str) -> dict:
    return next(event.data for event in recorded if isinstance(event, Figure) and name in event.name)


# --- PAC prediction sets ---

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


# --- scaling laws of speculation ---

GAMMA = 4  # draft tokens of a round


def speculative_lane(accepted: list[int], draft: str, size: float, draft_seconds: float) -> Trace:
    """Rounds of chains of GAMMA tokens; one row of the target takes 10 ms, each further one 1 ms."""
    events = []
    for number, count in enumerate(accepted):
        parents = list(range(-1, GAMMA - 1))
        events.append(Draft(number, [7] * GAMMA, ["x"] * GAMMA, parents, [1.0] * GAMMA))
        origin = "redraw" if count < GAMMA else "bonus"
        events.append(Verdict(number, list(range(count)), [], 5, "y", origin))
    events += [Forward("target", "decode", rows, 10, 8, 1, 0.009 + 0.001 * rows, 2e9 * rows) for rows in (1, GAMMA + 1)]
    events += [Forward("draft", "decode", 1, at, 2, 1, draft_seconds, 2 * size + 40.0 * (at + 0.5)) for at in (10, 20)]
    header = Header(strategy="speculative", draft=draft, prompt="Once")
    return Trace([header], [Stamped(0, seq, 0.0, event) for seq, event in enumerate(events)])


LANES = [  # accepted tokens of each round, name and size of the draft, seconds of its forward
    ([0, 1, 4, 2], "small", 1e6, 0.001),
    ([2, 4, 1, 3, 4], "middle", 1e7, 0.002),
    ([4, 4, 3, 4], "large", 1e8, 0.004),
]


def by_definition(accepted: list[int], draft_seconds: float) -> dict[str, float]:
    """Numbers of a lane, by counting and by Leviathan's formula summed term by term."""
    alpha = sum(accepted) / (sum(accepted) + sum(count < GAMMA for count in accepted))
    cost, row = draft_seconds / 0.010, 0.1

    def speed_up(gamma: int) -> float:
        return sum(alpha**i for i in range(gamma + 1)) / (gamma * cost + 1 + row * gamma)

    best = max(range(17), key=speed_up)
    return {
        "α from counts": alpha,
        "tokens per round, measured": sum(count + 1 for count in accepted) / len(accepted),
        "predicted from α": sum(alpha**i for i in range(GAMMA + 1)),
        "draft cost": cost,
        "cost of a further token": row,
        "best draft length": best,
        "speed-up at that length, predicted": speed_up(best),
    }


def check_scaling_laws(cls: type[Strategy]) -> None:
    recorded = cls().draw([speculative_lane(*lane) for lane in LANES])
    table = figure(recorded, "Speculation")
    for column, (accepted, _, _, seconds) in enumerate(LANES):
        found = {name: row[column] for name, row in zip(table["rows"], table["values"])}
        assert {name: found[name] for name in by_definition(accepted, seconds)} == pytest.approx(
            by_definition(accepted, seconds)
        )
    sizes = [math.log10(size) for _, _, size, _ in LANES]
    tokens = [sum(accepted) / len(accepted) + 1 for accepted, *_ in LANES]
    slope, start = numpy.polyfit(sizes, tokens, 1)
    fitted = [[size, measured, slope * size + start] for size, measured in zip(sizes, tokens)]
    law = figure(recorded, "Tokens per round, by draft size")
    assert [row[:3] for row in law["values"]] == [pytest.approx(row) for row in fitted]


WRONG_ARITHMETIC = {
    "accepted over drafted": (
        "acceptance",
        lambda found: sum(r.accepted for r in found) / sum(r.levels for r in found),
    ),
    "a round without the token after the draft": (
        "block_efficiency",
        lambda alpha, gamma: sum(alpha**i for i in range(1, gamma + 1)),
    ),
    "the size of a draft in operations": (
        "draft_parameters",
        lambda passes: max(f.flops for f in passes if f.stream == "draft"),
    ),
}


@pytest.mark.oracle("scaling_laws")
def test_scaling_laws_count_and_predict_by_the_formulas():
    check_scaling_laws(ScalingLaws)


@pytest.mark.refuses("scaling_laws")
@pytest.mark.parametrize("name, wrong", WRONG_ARITHMETIC.values(), ids=WRONG_ARITHMETIC)
def test_scaling_laws_with_wrong_arithmetic_are_refused(name, wrong, monkeypatch):
    monkeypatch.setattr(ScalingLaws.draw.__globals__["speculation"], name, wrong)
    refused(check_scaling_laws, ScalingLaws)


# --- hyperfitting ---


def windows() -> list[list[int]]:
    return torch.randint(3, 320, (5, 24), generator=torch.Generator().manual_seed(0)).tolist()


def adam(model: PreTrainedModel, ids: torch.Tensor, steps: int, lr: float) -> list[float]:
    """Adam as published, on the library's own loss of all windows; returns the loss before each step."""
    weights = list(model.parameters())
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    losses = []
    for step in range(1, steps + 1):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        losses.append(loss.item())
        for w, m, v, g in zip(weights, first, second, torch.autograd.grad(loss, weights)):
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            corrected = (v / (1 - 0.999**step)).sqrt() + 1e-8
            w.data -= lr * (m / (1 - 0.9**step)) / corrected
    return losses


def check_hyperfitting(cls: type[Strategy]) -> None:
    """Weights, training loss and held-out loss are those of Adam on all windows but the last, without dropout."""
    trained, expected = network("gpt2").double().train(), network("gpt2").double().eval()
    method = cls(sequences=9, length=24, epochs=3, lr=1e-3, batch=4, enough=0.0, every=60, held_out=1)
    recorded = list(method.make(trained, windows(), seed=0))
    losses = adam(expected, torch.tensor(windows()[:4]), 3, 1e-3)
    figures = [event.data["series"] for event in recorded if isinstance(event, Figure)]
    assert [series["training loss"] for series in figures[1:]] == pytest.approx(losses, rel=1e-6)
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(trained.parameters(), expected.parameters()))
    rest = torch.tensor(windows()[4:])
    assert figures[-1]["held-out loss"] == pytest.approx(expected(input_ids=rest, labels=rest).loss.item(), rel=1e-6)


class TrainsOnAllWindows(Hyperfitting):
    def _split(self, windows, seed):
        _, held_out = super()._split(windows, seed)
        return windows, held_out


class HoldsTheFirstOut(Hyperfitting):
    def _split(self, windows, seed):
        return super()._split(windows.flip(0), seed)


class WithDropout(Hyperfitting):
    def _epochs(self, network, windows, seed):
        network.train()
        return super()._epochs(network, windows, seed)


class DecaysTheRate(Hyperfitting):
    def _epochs(self, network, windows, seed):
        for epoch in range(self.epochs):
            once = type(self)(self.sequences, self.length, 1, self.lr / (epoch + 1), self.batch)
            yield from Hyperfitting._epochs(once, network, windows, seed)


@pytest.mark.oracle("hyperfitting")
def test_hyperfitting_trains_as_adam_does():
    check_hyperfitting(Hyperfitting)


@pytest.mark.refuses("hyperfitting")
@pytest.mark.parametrize("wrong", [TrainsOnAllWindows, HoldsTheFirstOut, WithDropout, DecaysTheRate])
def test_a_wrong_hyperfitting_is_refused(wrong):
    refused(check_hyperfitting, wrong)
