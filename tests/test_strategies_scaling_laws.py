"""Scaling laws of speculation against a figure computed by hand, and wrong variants against the same check."""
from __future__ import annotations

import math

import numpy
import pytest

from playground.contract import Strategy, find
from playground.events import Draft, Forward, Header, Stamped, Verdict
from playground.trace import Trace
from support.study_figures import figure
from support.wrong_variants import refused

ScalingLaws = find("scaling_laws")
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
