"""Induce-then-contrast against its law by hand, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest
import torch
from registry import Collapse
from runs import alone, written
from tables import TableModel
from torch import Tensor

from playground.contract import Sampler
from playground.contract.lane_config import LaneConfig
from support.contrast_oracles import ICD, V, check_contrasted, drawn, logs
from support.contrasting import contrasted
from support.wrong_variants import refused


def on_the_bar() -> Tensor:
    """Rows with exact halves as probabilities, so that tokens are exactly on a threshold of one half; and random ones.
    """
    halves = torch.tensor([[0.0, -1.0, -1.0, *[-6.0] * (V - 3)]], dtype=torch.float64) * math.log(2)
    return torch.cat([halves, drawn(0)])


def check_icd(cls: type[Sampler]) -> None:
    rows = {"target": on_the_bar(), "induced": drawn(1, V + 1)}
    scores = [[a - b for a, b in zip(logs(z), logs(y))] for z, y in zip(*(row.tolist() for row in rows.values()))]
    for rho in (0.0, 0.1, 0.5):
        check_contrasted(cls(rho=rho).mix(rows), rows["target"], scores, rho)


class InducedAgainstOwn(ICD):
    def mix(self, rows):
        return super().mix({"target": rows["induced"], "induced": rows["target"]})


class EveryTokenCompetes(ICD):
    def mix(self, rows):
        return rows["target"].log_softmax(-1) - rows["induced"].log_softmax(-1)


class PlausibleToTheInduced(ICD):
    def mix(self, rows):
        p = rows["induced"].softmax(-1)
        scores = rows["target"].log_softmax(-1) - rows["induced"].log_softmax(-1)
        return scores.masked_fill(p < self.rho * p.amax(-1, keepdim=True), -1e4)


class ScoresByTheModelAlone(ICD):
    def mix(self, rows):
        return super().mix(rows | {"induced": torch.zeros_like(rows["induced"])})


@pytest.mark.oracle("icd")
def test_icd_subtracts_the_induced_row_among_plausible_tokens():
    check_icd(ICD)


@pytest.mark.refuses("icd")
@pytest.mark.parametrize("wrong", [InducedAgainstOwn, EveryTokenCompetes, PlausibleToTheInduced, ScoresByTheModelAlone])
def test_a_wrong_icd_is_refused(wrong):
    refused(check_icd, wrong)


GREEDY = LaneConfig("greedy")
COLLAPSES = {"icd": [Collapse(alone("icd", rho=1.0), GREEDY)]}


@pytest.mark.oracle("icd")
def test_the_contrast_equals_full_forwards_of_both_streams():
    for seed in range(5):
        model, text = TableModel("abcde", seed=seed), []
        for _ in range(10):
            p, a = (model.scores((*prompt, *text)).log_softmax(-1).tolist() for prompt in ([0, 1, 2], [3, 2]))
            text.append(contrasted(p, a, 0.1))
        assert written(alone("icd"), {"target": model}, [0, 1, 2], 10, other=[3, 2]) == text
    assert any(
        written(alone("icd"), {"target": TableModel("abcde", seed=s)}, [3, 2], 10, other=[0, 1, 2])
        != written(alone("icd"), {"target": TableModel("abcde", seed=s)}, [0, 1, 2], 10, other=[3, 2])
        for s in range(5)
    )
