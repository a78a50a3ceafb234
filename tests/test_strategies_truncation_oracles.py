"""Samplers that reshape one row: each against an independent oracle, and each oracle against plausible mistakes.

Every strategy has one `check_...(cls)`, written without its code: the processor of the transformers library where
there is one, otherwise the published formula in plain loops. The strategy passes it, and subclasses with one mistake
fail it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from playground.contract import Sampler, find

Epsilon, Eta, MinP, TopH, TopK, TopNSigma, TopP, Typical = (
    find(name) for name in ("epsilon", "eta", "min_p", "top_h", "top_k", "top_n_sigma", "top_p", "typical")
)
RepetitionPenalty, Temperature = find("repetition_penalty"), find("temperature")
REMOVED = -math.inf
V = 30


def drawn(seed: int, count: int = 20) -> Tensor:
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def distinct_rows() -> Tensor:
    """Random rows, and rows in which a grammar has already removed most tokens; no two scores of a row are equal."""
    return torch.cat([drawn(0), drawn(1).masked_fill(drawn(2) > 0, REMOVED)])


def awkward_rows() -> Tensor:
    """The same with rows of many ties, and one that is flat."""
    return torch.cat([distinct_rows(), drawn(3).round(), torch.zeros(1, V, dtype=torch.float64)])


def applied(cls: type[Sampler], rows: Tensor, **knobs) -> Tensor:
    return cls(**knobs).apply(rows, [[]] * len(rows))


def agrees(cls: type[Sampler], knob: str, theirs: Callable, values: list, rows: Tensor) -> None:
    """The strategy's rows are those of a library processor, removed tokens included."""
    for value in values:
        assert torch.equal(applied(cls, rows, **{knob: value}), theirs(value)(None, rows)), value


def refused(check: Callable, wrong: type[Sampler]) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


def removing(gone: Callable[[Sampler, Tensor, Tensor], Tensor]) -> Callable:
    """An `apply` that removes the tokens where gone(sampler, scores [n, V], probabilities [n, V]) is true."""
    return lambda self, scores, histories: scores.masked_fill(gone(self, scores, scores.softmax(-1)), REMOVED)


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


def below_the_crossing(self: Sampler, scores: Tensor, p: Tensor) -> Tensor:
    ordered, order = p.sort(descending=True)
    out = ordered.cumsum(-1) > self.p
    out[..., 0] = False
    return out.scatter(-1, order, out) & (self.p < 1)


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
