"""Repetition penalty against the library or its published formula, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from playground.contract import Sampler, find
from support.truncation_oracles import V, awkward_rows
from support.wrong_variants import refused

RepetitionPenalty = find("repetition_penalty")


def check_repetition_penalty(cls: type[Sampler]) -> None:
    history = torch.randint(V, (len(awkward_rows()), 9), generator=torch.Generator().manual_seed(0))
    history[:, 4] = history[:, 0]  # one token occurs twice
    for penalty in (0.8, 1.0, 1.3):
        expected = RepetitionPenaltyLogitsProcessor(penalty)(history, awkward_rows())
        assert torch.equal(cls(penalty).apply(awkward_rows(), history.tolist()), expected)
    beyond = cls(1.3).apply(
        torch.ones(1, 3, dtype=torch.float64), [[2, 7]]
    )  # the text may contain tokens without a score
    assert beyond[0].tolist() == pytest.approx([1, 1, 1 / 1.3])


class OncePerOccurrence(RepetitionPenalty):
    def apply(self, scores, histories):
        repeated = [[token for token in history if history.count(token) > 1] for history in histories]
        return super().apply(super().apply(scores, histories), repeated)


class DividesNegativeScores(RepetitionPenalty):
    def apply(self, scores, histories):
        seen = torch.stack([torch.isin(torch.arange(scores.shape[-1]), torch.tensor(history)) for history in histories])
        return torch.where(seen, scores / self.penalty, scores)


class NotTheLastToken(RepetitionPenalty):
    def apply(self, scores, histories):
        return super().apply(scores, [history[:-1] for history in histories])


@pytest.mark.oracle("repetition_penalty")
def test_the_repetition_penalty_is_the_librarys():
    check_repetition_penalty(RepetitionPenalty)


@pytest.mark.refuses("repetition_penalty")
@pytest.mark.parametrize("wrong", [OncePerOccurrence, DividesNegativeScores, NotTheLastToken])
def test_a_wrong_repetition_penalty_is_refused(wrong):
    refused(check_repetition_penalty, wrong)
