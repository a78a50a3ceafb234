"""Top-n-sigma against the library or its published formula, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from playground.contract import Sampler
from support.truncation_oracles import REMOVED, TopNSigma, applied, awkward_rows, distinct_rows, removing
from support.wrong_variants import refused


def above_the_noise(row: list[float], n: float) -> set[int]:
    """Tokens within n population standard deviations of the best score, of those that are left; in a loop."""
    left = [score for score in row if score > REMOVED]
    mean = sum(left) / len(left)
    deviation = math.sqrt(sum((score - mean) ** 2 for score in left) / len(left))
    return {token for token, score in enumerate(row) if score >= max(row) - n * deviation}


def check_top_n_sigma(cls: type[Sampler]) -> None:
    for n in (0.3, 1.0, 1.7):
        kept = applied(cls, distinct_rows(), n=n) > REMOVED
        assert [set(row.nonzero().flatten().tolist()) for row in kept] == [
            above_the_noise(row, n) for row in distinct_rows().tolist()
        ]
    assert torch.equal(applied(cls, awkward_rows(), n=0.0), awkward_rows())


class FromTheMean(TopNSigma):
    apply = removing(
        lambda self, scores, p: (scores < Finite(scores).mean + self.n * Finite(scores).std) & (self.n > 0)
    )


class OfProbabilities(TopNSigma):
    apply = removing(
        lambda self, scores, p: (p < p.amax(-1, keepdim=True) - self.n * p.std(-1, keepdim=True)) & (self.n > 0)
    )


class CountsRemovedTokens(TopNSigma):
    """Counts removed tokens as scores of zero."""

    def apply(self, scores, histories):
        return super().apply(scores.clamp(min=0.0), histories).where(scores > REMOVED, REMOVED) if self.n else scores


class Finite:
    """Mean and standard deviation of the remaining scores of each row, [n, 1]."""

    def __init__(self, scores: Tensor):
        left = scores.masked_fill(scores == REMOVED, math.nan)
        self.mean = left.nanmean(-1, keepdim=True)
        self.std = ((left - self.mean) ** 2).nanmean(-1, keepdim=True).sqrt()


@pytest.mark.oracle("top_n_sigma")
def test_top_n_sigma_equals_a_loop_over_its_definition():
    check_top_n_sigma(TopNSigma)


@pytest.mark.refuses("top_n_sigma")
@pytest.mark.parametrize("wrong", [FromTheMean, OfProbabilities, CountsRemovedTokens])
def test_a_wrong_top_n_sigma_is_refused(wrong):
    refused(check_top_n_sigma, wrong)
