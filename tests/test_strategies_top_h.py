"""Top-H against the library or its published formula, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import TopHLogitsWarper

from playground.contract import Sampler
from support.truncation_oracles import TopH, TopP, agrees, below_the_crossing, distinct_rows, drawn, removing
from support.wrong_variants import refused


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
