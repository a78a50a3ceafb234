"""Top-p (nucleus) against the library or its published formula, and wrong variants against the same check."""
from __future__ import annotations

import math

import pytest
from transformers import TopPLogitsWarper

from playground.contract import Sampler
from support.truncation_oracles import REMOVED, TopP, agrees, applied, below_the_crossing, distinct_rows, removing
from support.wrong_variants import refused


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
