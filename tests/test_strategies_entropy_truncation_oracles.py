"""Truncation by entropy and by deviation against its formulas written apart."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import EpsilonLogitsWarper, EtaLogitsWarper, TopHLogitsWarper, TypicalLogitsWarper

from playground.contract import Sampler
from support.truncation_oracles import (
    REMOVED,
    Epsilon,
    Eta,
    TopH,
    TopNSigma,
    TopP,
    Typical,
    V,
    agrees,
    applied,
    awkward_rows,
    below_the_crossing,
    distinct_rows,
    drawn,
    refused,
    removing,
)

# --- epsilon and eta ---

def check_epsilon(cls: type[Sampler]) -> None:
    agrees(cls, "epsilon", EpsilonLogitsWarper, [0.0003, 0.02, 0.1, 0.9], awkward_rows())
    assert torch.equal(applied(cls, awkward_rows(), epsilon=0.0), awkward_rows())


class RelativeFloor(Epsilon):
    apply = removing(lambda self, scores, p: p < self.epsilon * p.amax(-1, keepdim=True))


class MayRemoveTheBest(Epsilon):
    apply = removing(lambda self, scores, p: p < self.epsilon)


@pytest.mark.oracle("epsilon")
def test_epsilon_is_the_librarys():
    check_epsilon(Epsilon)


@pytest.mark.refuses("epsilon")
@pytest.mark.parametrize("wrong", [RelativeFloor, MayRemoveTheBest])
def test_a_wrong_epsilon_is_refused(wrong):
    refused(check_epsilon, wrong)


def entropies(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1, keepdim=True)


def check_eta(cls: type[Sampler]) -> None:
    agrees(cls, "eta", EtaLogitsWarper, [0.0003, 0.02, 0.1, 0.3], awkward_rows())


def below_floor(p: Tensor, eta: float, floor: Tensor | float) -> Tensor:
    """Tokens less probable than the smaller of eta and a floor [n, 1], except the best."""
    return (p < torch.as_tensor(floor).clamp(max=eta)) & (p < p.amax(-1, keepdim=True))


class EntropyInBits(Eta):
    apply = removing(
        lambda self, scores, p: below_floor(p, self.eta, self.eta**0.5 * (-entropies(p) / math.log(2)).exp())
    )


class WithoutTheRoot(Eta):
    apply = removing(lambda self, scores, p: below_floor(p, self.eta, self.eta * (-entropies(p)).exp()))


class NeverSinks(Eta):
    apply = removing(lambda self, scores, p: below_floor(p, self.eta, self.eta))


@pytest.mark.oracle("eta")
def test_eta_is_the_librarys():
    check_eta(Eta)


@pytest.mark.refuses("eta")
@pytest.mark.parametrize("wrong", [EntropyInBits, WithoutTheRoot, NeverSinks])
def test_a_wrong_eta_is_refused(wrong):
    refused(check_eta, wrong)


# --- top-h ---

def check_top_h(cls: type[Sampler]) -> None:
    wide = torch.cat([drawn(seed) for seed in range(7)], -1)  # more than the hundred tokens that are looked at
    for rows in (distinct_rows(), wide):
        agrees(cls, "h", TopHLogitsWarper, [0.05, 0.4, 0.8], rows)


class WithTheCrossingToken(TopH):
    apply = removing(lambda self, scores, p: prefix_above(p, self.h, strict=True))


def prefix_above(p: Tensor, share: float, strict: bool) -> Tensor:
    """Tokens behind the descending prefix with this share of the entropy; `strict`: only those wholly behind it."""
    ordered, order = p.sort(descending=True)
    terms = torch.special.entr(ordered)
    reached = terms.cumsum(-1) - (terms if strict else 0)
    out = reached > share * terms.sum(-1, keepdim=True)
    out[..., 0] = False
    return out.scatter(-1, order, out)


class LooksAtAllTokens(TopH):
    apply = removing(lambda self, scores, p: prefix_above(p, self.h, strict=False))


class ShareOfTheMass(TopH):
    apply = removing(lambda self, scores, p: below_the_crossing(TopP(self.h), scores, p))


@pytest.mark.oracle("top_h")
def test_top_h_is_the_librarys_beyond_a_hundred_tokens_too():
    check_top_h(TopH)


@pytest.mark.refuses("top_h")
@pytest.mark.parametrize("wrong", [WithTheCrossingToken, LooksAtAllTokens, ShareOfTheMass])
def test_a_wrong_top_h_is_refused(wrong):
    refused(check_top_h, wrong)


# --- typical ---

def check_typical(cls: type[Sampler]) -> None:
    agrees(cls, "mass", TypicalLogitsWarper, [0.05, 0.2, 0.9, 0.95], awkward_rows())
    assert torch.equal(applied(cls, awkward_rows(), mass=1.0), awkward_rows())


class MostProbableFirst(Typical):
    apply = removing(lambda self, scores, p: TopP(self.mass).apply(scores, []) == REMOVED)


class TypicalInBits(Typical):
    apply = removing(lambda self, scores, p: far_from(p, -p.log(), entropies(p) / math.log(2), self.mass))


class AlwaysTheBest(Typical):
    """Never removes the most probable token."""

    def apply(self, scores, histories):
        best = scores.argmax(-1, keepdim=True)
        return super().apply(scores, histories).scatter(-1, best, scores.gather(-1, best))


def far_from(p: Tensor, surprise: Tensor, expected: Tensor, mass: float) -> Tensor:
    """Tokens whose surprise is farther from the expected one than the nearest that hold this mass."""
    gap = (surprise - expected).abs()
    nearest, order = gap.sort(-1)
    last = (p.gather(-1, order).cumsum(-1) < mass).sum(-1, keepdim=True).clamp(max=V - 1)
    return (gap > nearest.gather(-1, last)) & (mass < 1)


@pytest.mark.oracle("typical")
def test_typical_is_the_librarys():
    check_typical(Typical)


@pytest.mark.refuses("typical")
@pytest.mark.parametrize("wrong", [MostProbableFirst, TypicalInBits, AlwaysTheBest])
def test_a_wrong_typical_is_refused(wrong):
    refused(check_typical, wrong)


# --- top-n-sigma ---

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
