"""Dream's sampler: which positions it fills, by its rule, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from tables import distance

from playground.algorithms.diffusion.proposals import Proposals
from playground.contract.lane_config import LaneConfig, assemble
from strategies.diffusion.dream import Dream
from support.canvas_laws import law, law_of, random_table
from support.canvases import LENGTH, canvas, course, denoiser, fills, run


@pytest.mark.oracle("dream")
@pytest.mark.parametrize("rule", ["topk_margin", "entropy"])
def test_dream_at_one_position_per_forward_and_temperature_one_follows_the_table(rule):
    table = random_table(2, 3)
    found = law(table, OneByOne(rule=rule, temperature=1.0))
    assert distance(found, law_of(table)) < 1e-12


class OneByOne(Dream):
    """Dream's rules with one position per forward, which its schedule of times does not give exactly."""

    def _chosen(self, lm, rows, given, share):
        return super()._chosen(lm, rows, given, 1 / len(given.tokens) + 1e-9)


@pytest.mark.refuses("dream")
def test_all_positions_at_once_do_not_follow_the_table():
    table = random_table(2, 3)
    assert distance(law(table, Dream(steps=1, temperature=1.0)), law_of(table)) > 0.01


@pytest.mark.oracle("dream")
@pytest.mark.parametrize("steps", [1, 3, 5, 14, 20])
def test_each_step_fills_the_share_that_the_times_give(steps):
    """By hand: time t falls evenly from 1 to 0.001; a step fills floor(masked * (1 - s / t)), the last one all."""
    left, expected = LENGTH, []
    for step in range(steps):
        time, following = (1 - (1 - 1e-3) * i / steps for i in (step, step + 1))
        count = left if step == steps - 1 else int(left * (1 - following / time))
        expected += [count] * (count > 0)
        left -= count
    events = run(denoiser(), "dream", steps=steps)
    assert [len(fill.positions) for fill in fills(events)] == expected


def test_dreams_scores_are_those_of_their_names():
    rows = run_rows(torch.tensor([[2.0, 1.0, 0.0]]).double())
    p = torch.tensor([2.0, 1.0, 0.0]).double().softmax(-1)
    given = Proposals({0: 0}, {0: float(p[0])})
    scores = {rule: Dream(rule=rule)._score(rows, given, 0) for rule in ("maskgit_plus", "topk_margin", "entropy")}
    assert scores == pytest.approx({
        "maskgit_plus": float(p[0]), "topk_margin": float(p[0] - p[1]), "entropy": float((p * p.log()).sum())
    })


def run_rows(raw: torch.Tensor):
    """Rows of a plain lane with these logits."""
    lane = canvas(denoiser(), assemble(LaneConfig("dream")))
    return lane.rows_of(raw)


@pytest.mark.slow
def test_origin_fills_each_position_with_the_share_as_probability():
    counts = [
        len(fills(run(denoiser(), "dream", rule="origin", steps=2, seed=seed))[0].positions) for seed in range(40)
    ]
    assert len(set(counts)) > 2 and abs(sum(counts) / 40 - LENGTH / 2) < 1.5  # five standard errors


def test_an_order_temperature_draws_positions():
    courses = {
        tuple(position for position, _, _ in course(run(denoiser(), "dream", order_temperature=1.0, seed=seed)))
        for seed in range(4)
    }
    assert len(courses) == 4
