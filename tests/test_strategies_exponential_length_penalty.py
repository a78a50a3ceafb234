"""The exponential length penalty against the library's, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from registry import Collapse
from runs import alone, run
from tables import TableModel
from transformers import ExponentialDecayLengthPenalty

from playground.contract import Sampler, find
from playground.contract.lane_config import LaneConfig
from support.processed_rows import END, REMOVED, begun, histories, rows
from support.wrong_variants import refused

Penalty = find("exponential_length_penalty")
GREEDY = LaneConfig("greedy")
COLLAPSES = {"exponential_length_penalty": [Collapse(alone("exponential_length_penalty", factor=1.0), GREEDY)]}


def check_penalty(cls: type[Sampler]) -> None:
    """Every row of the library's processor, after prompts of one token."""
    for start_at, factor in ((0, 1.3), (2, 1.05), (4, 2.0)):
        library = ExponentialDecayLengthPenalty((start_at, factor), END, 1)
        found = begun(cls(start_at, factor)).apply(rows(), histories())
        expected = [library(torch.tensor([history]), row[None])[0] for history, row in zip(histories(), rows())]
        assert torch.allclose(found, torch.stack(expected), atol=1e-12)


class CountsThePrompt(Penalty):
    def apply(self, scores, histories):
        return super().apply(scores, [[0, *history] for history in histories])


class Linear(Penalty):
    def _bonus(self, scores, beyond):
        return scores.abs() * (self.factor - 1) * beyond


class LowersNegativeScores(Penalty):
    """Multiplies the score, which makes an improbable end less probable."""

    def _bonus(self, scores, beyond):
        return super()._bonus(scores, beyond) * scores.sign()


@pytest.mark.oracle("exponential_length_penalty")
def test_the_end_is_raised_as_in_the_library():
    check_penalty(Penalty)


@pytest.mark.refuses("exponential_length_penalty")
@pytest.mark.parametrize("wrong", [CountsThePrompt, Linear, LowersNegativeScores])
def test_a_wrong_penalty_is_refused(wrong):
    refused(check_penalty, wrong)


def test_a_text_that_would_go_on_for_ever_ends_after_the_given_length():
    model = TableModel("ab.", ".", rule=lambda context: torch.tensor([2.0, 1.0, -4.0], dtype=torch.float64))
    plain, _ = run(GREEDY, {"target": model}, [0], 60)
    ended, events = run(alone("exponential_length_penalty", start_at=10, factor=1.1), {"target": model}, [0], 60)
    assert plain.generated == 60 and plain.reason == "length"
    # -4 + 4 (1.1^n - 1) > 2 at n = 10
    assert ended.generated == 21 and ended.reason == "end"


@pytest.mark.parametrize("score", [REMOVED, -3e38, 3e30])
def test_a_removed_end_stays_removed_and_a_large_score_stays_finite(score):
    row = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, score]])
    found = begun(Penalty(0, 2.0)).apply(row, [[0] * 1024])
    assert not found.isnan().any() and (found[0, END] > REMOVED) == (score > REMOVED)
    assert found.softmax(-1).isfinite().all()
