"""Top-k against the library or its published formula, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from transformers import TopKLogitsWarper

from playground.contract import Sampler
from support.truncation_oracles import REMOVED, TopK, V, agrees, applied, awkward_rows
from support.wrong_variants import refused


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
