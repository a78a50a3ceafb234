"""Samplers that reshape one row: each against an independent oracle, and each oracle against plausible mistakes.

Every strategy has one `check_...(cls)`, written without its code: the processor of the transformers library where
there is one, otherwise the published formula in plain loops. The strategy passes it, and subclasses with one mistake
fail it.
"""
from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from playground.contract import Sampler, find
from support.truncation_oracles import (
    REMOVED,
    MinP,
    TopK,
    TopP,
    V,
    agrees,
    applied,
    awkward_rows,
    below_the_crossing,
    distinct_rows,
    refused,
    removing,
)

RepetitionPenalty, Temperature = find("repetition_penalty"), find("temperature")


# --- temperature ---

def check_temperature(cls: type[Sampler]) -> None:
    agrees(cls, "t", TemperatureLogitsWarper, [0.05, 0.7, 1.0, 2.0], awkward_rows())
    cold = applied(cls, awkward_rows(), t=0.0)
    assert [(row > REMOVED).nonzero().flatten().tolist() for row in cold] == [
        [row.tolist().index(max(row.tolist()))] for row in awkward_rows()
    ]


class Multiplies(Temperature):
    def apply(self, scores, histories):
        return scores * self.t if self.t else super().apply(scores, histories)


class KeepsTiesWhenCold(Temperature):
    def apply(self, scores, histories):
        return (
            super().apply(scores, histories)
            if self.t
            else scores.masked_fill(scores < scores.amax(-1, keepdim=True), REMOVED)
        )


class IgnoresZero(Temperature):
    def apply(self, scores, histories):
        return super().apply(scores, histories) if self.t else scores


@pytest.mark.oracle("temperature")
def test_temperature_is_the_librarys_and_at_zero_the_first_largest_score():
    check_temperature(Temperature)


@pytest.mark.refuses("temperature")
@pytest.mark.parametrize("wrong", [Multiplies, KeepsTiesWhenCold, IgnoresZero])
def test_a_wrong_temperature_is_refused(wrong):
    refused(check_temperature, wrong)


# --- top-k ---

def check_top_k(cls: type[Sampler]) -> None:
    agrees(cls, "k", TopKLogitsWarper, [1, 2, 5, V - 1, V, V + 1, 5000], awkward_rows())
    assert torch.equal(applied(cls, awkward_rows(), k=0), awkward_rows())


class OneTooMany(TopK):
    def apply(self, scores, histories):
        return type(self).__mro__[1](self.k + 1).apply(scores, histories) if self.k else scores


class DropsTies(TopK):
    def apply(self, scores, histories):
        kept = scores.topk(min(self.k or V, V)).indices
        return torch.full_like(scores, REMOVED).scatter(-1, kept, scores.gather(-1, kept))


class KeepsTheTail(TopK):
    """Retains exactly what it should remove."""

    def apply(self, scores, histories):
        return scores.masked_fill(super().apply(scores, histories) > REMOVED, REMOVED) if self.k else scores


@pytest.mark.oracle("top_k")
def test_top_k_equals_the_librarys_with_ties_and_large_k():
    check_top_k(TopK)


@pytest.mark.refuses("top_k")
@pytest.mark.parametrize("wrong", [OneTooMany, DropsTies, KeepsTheTail])
def test_a_wrong_top_k_is_refused(wrong):
    refused(check_top_k, wrong)


# --- top-p ---

def nucleus(row: list[float], p: float) -> set[int]:
    """Tokens one by one from the most probable, until their mass reaches p; by the definition, in a loop."""
    total, mass, kept = sum(map(math.exp, row)), 0.0, set()
    for token in sorted(range(len(row)), key=lambda token: -row[token]):
        if mass >= p and kept:
            break
        kept.add(token)
        mass += math.exp(row[token]) / total
    return kept


def check_top_p(cls: type[Sampler]) -> None:
    agrees(cls, "p", TopPLogitsWarper, [0.01, 0.5, 0.9, 0.999, 1.0], distinct_rows())
    for p in (0.0, 0.3, 0.77):
        kept = applied(cls, distinct_rows(), p=p) > REMOVED
        assert [set(row.nonzero().flatten().tolist()) for row in kept] == [
            nucleus(row, p) for row in distinct_rows().tolist()
        ]


class WithoutTheCrossingToken(TopP):
    apply = removing(below_the_crossing)


class CrossesTwice(TopP):
    """Shifts its mask by one position too many."""

    def apply(self, scores, histories):
        once = super().apply(scores, histories)
        best_removed = scores.masked_fill(once > REMOVED, REMOVED).argmax(-1, keepdim=True)
        return once.scatter(-1, best_removed, scores.gather(-1, best_removed)) if self.p < 1 else once


class ShareOfTheBest(TopP):
    apply = removing(lambda self, scores, p: p < (1 - self.p) * p.amax(-1, keepdim=True))


@pytest.mark.oracle("top_p")
def test_top_p_is_the_librarys_and_the_nucleus_of_its_definition():
    check_top_p(TopP)


@pytest.mark.refuses("top_p")
@pytest.mark.parametrize("wrong", [WithoutTheCrossingToken, CrossesTwice, ShareOfTheBest])
def test_a_wrong_top_p_is_refused(wrong):
    refused(check_top_p, wrong)


# --- min-p ---

def check_min_p(cls: type[Sampler]) -> None:
    agrees(cls, "m", MinPLogitsWarper, [0.001, 0.05, 0.5], awkward_rows())
    edge = torch.tensor(
        [[4.0, 2.0, 1.0, 1.0]], dtype=torch.float64
    ).log()  # probabilities are exact halves of each other
    assert (applied(cls, edge, m=0.5) > REMOVED).tolist() == [[True, True, False, False]], "a token on the bar stays"
    assert torch.equal(applied(cls, awkward_rows(), m=0.0), awkward_rows())


class StrictBar(MinP):
    apply = removing(lambda self, scores, p: p <= self.m * p.amax(-1, keepdim=True))


class AbsoluteBar(MinP):
    apply = removing(lambda self, scores, p: (p < self.m) & (p < p.amax(-1, keepdim=True)))


class BarOnScores(MinP):
    apply = removing(lambda self, scores, p: scores < self.m * scores.amax(-1, keepdim=True))


@pytest.mark.oracle("min_p")
def test_min_p_is_the_librarys():
    check_min_p(MinP)


@pytest.mark.refuses("min_p")
@pytest.mark.parametrize("wrong", [StrictBar, AbsoluteBar, BarOnScores])
def test_a_wrong_min_p_is_refused(wrong):
    refused(check_min_p, wrong)


# --- repetition penalty ---

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
