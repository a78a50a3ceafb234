"""Sampling against the library on table models, and wrong variants against the same check."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tables import Law, TableModel, Text, distance, law
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from playground.contract import Decoder, find
from support.plain_lanes import ReadsOneRowTwice, lane_of
from support.wrong_variants import refused

Sample = find("sample")


def text_law(rows: Callable[[Text], Tensor], prompt: list[int], length: int) -> Law:
    """Probability of every text of so many tokens, each token drawn from rows(text so far) [V]."""
    found: Law = {(): 1.0}
    for _ in range(length):
        following = [(text, p, rows((*prompt, *text)).softmax(-1).tolist()) for text, p in found.items()]
        found = {(*text, token): p * q for text, p, row in following for token, q in enumerate(row) if q > 0}
    return found


V = 6
SETTINGS = [  # of temperature, top_k, top_p, min_p and repetition_penalty
    (1.0, 0, 1.0, 0.0, 1.0),
    (1.6, 4, 0.75, 0.0, 1.4),
    (1.3, 2, 1.0, 0.0, 2.0),
    (0.7, 0, 0.9, 0.15, 0.8),
    (1.9, 3, 1.0, 0.3, 1.0),
]


def by_the_library(model: TableModel, t: float, k: int, p: float, m: float, r: float) -> Callable[[Text], Tensor]:
    """A row after the library's processors, in its order; a k of 0 keeps all."""
    chain = [RepetitionPenaltyLogitsProcessor(r), TemperatureLogitsWarper(t), TopKLogitsWarper(k or V)]
    chain += [TopPLogitsWarper(p), MinPLogitsWarper(m)]

    def row(text: Text) -> Tensor:
        scores = model.scores(text)[None]
        for processor in chain:
            scores = processor(torch.tensor([text]), scores)
        return scores[0]

    return row


def check_sample(cls: type[Decoder]) -> None:
    for seed, (t, k, p, m, r) in enumerate(SETTINGS):
        model = TableModel("abcdef"[:V], seed=seed)
        decoder = cls(temperature=t, top_k=k, top_p=p, min_p=m, repetition_penalty=r)
        found = law(lane_of(decoder), {"target": model}, [0, 1, 2], 2)
        assert distance(found, text_law(by_the_library(model, t, k, p, m, r), [0, 1, 2], 2)) < 1e-9


class TemperatureLast(Sample):
    """Truncates rows first, as llama.cpp does."""

    def toggles(self):
        penalty, temperature, *cuts = super().toggles()
        return [penalty, *cuts, temperature]


class PenaltyAfterTopK(Sample):
    def toggles(self):
        penalty, temperature, top_k, *cuts = super().toggles()
        return [temperature, top_k, penalty, *cuts]


class ForgetsMinP(Sample):
    def toggles(self):
        return super().toggles()[:-1]


class DrawsWithoutReading(ReadsOneRowTwice, Sample): ...


@pytest.mark.oracle("sample")
def test_sampling_has_the_distribution_of_the_librarys_processors():
    check_sample(Sample)


@pytest.mark.refuses("sample")
@pytest.mark.parametrize("wrong", [TemperatureLast, PenaltyAfterTopK, ForgetsMinP, DrawsWithoutReading])
def test_a_wrong_sampling_is_refused(wrong):
    refused(check_sample, wrong)
