"""P-less sampling against its definition in plain loops, and wrong variants against the same check."""
from __future__ import annotations

import pytest
import torch

from playground.contract import Sampler, find
from playground.contract.lane_config import LaneConfig, assemble
from support.truncation_oracles import REMOVED, applied, awkward_rows, drawn, removing
from support.wrong_variants import refused

PLess = find("p_less")


def cut(p: list[float], norm: bool) -> float:
    """The chance that two draws agree; in the norm form, less the chance that they differ, per other token."""
    agree = sum(a * a for a in p)
    differ = sum(a * b for i, a in enumerate(p) for j, b in enumerate(p) if i != j)
    return agree - differ / (len(p) - 1) if norm else agree


def check_p_less(cls: type[Sampler]) -> None:
    for norm in (False, True):
        rows = awkward_rows()
        for found, p in zip(applied(cls, rows, norm=norm), rows.softmax(-1).tolist()):
            assert (found > REMOVED).tolist() == [a > 0 and a >= cut(p, norm) * (1 - 1e-4) for a in p]
    for p, kept in (((0.5, 0.3, 0.2), 1), ((0.4, 0.35, 0.25), 2), ((0.25,) * 4, 4), ((1.0, 0.0, 0.0), 1)):
        assert int((applied(cls, torch.tensor([p], dtype=torch.float64).log()) > REMOVED).sum()) == kept, p


class StrictlyAbove(PLess):
    """A uniform distribution loses all its tokens."""

    apply = removing(lambda self, scores, p: p <= self.threshold(p) * (1 + 1e-5))


class RootOfTheSum(PLess):
    def threshold(self, p):
        return super().threshold(p).clamp(min=0).sqrt()


class NormOfWhatIsLeft(PLess):
    """Counts the tokens that are left and not the vocabulary."""

    def threshold(self, p):
        size = (p > 0).sum(-1, keepdim=True)
        collision = p.square().sum(-1, keepdim=True)
        return (size * collision - 1) / (size - 1).clamp(min=1) if self.norm else collision


@pytest.mark.oracle("p_less")
def test_p_less_cuts_at_the_chance_that_two_draws_agree():
    check_p_less(PLess)


@pytest.mark.refuses("p_less")
@pytest.mark.parametrize("wrong", [StrictlyAbove, RootOfTheSum, NormOfWhatIsLeft])
def test_a_wrong_p_less_is_refused(wrong):
    refused(check_p_less, wrong)


def test_the_most_probable_token_stays_and_the_norm_form_keeps_all_that_the_other_keeps():
    rows = torch.cat([drawn(seed) * scale for seed, scale in enumerate((0.01, 0.3, 1.0, 5.0))])
    kept, more = (applied(PLess, rows, norm=norm) > REMOVED for norm in (False, True))
    assert kept.gather(-1, rows.argmax(-1, keepdim=True)).all()
    assert (more >= kept).all() and more.sum() > kept.sum()


def test_tokens_without_probability_change_the_norm_form_alone():
    rows = drawn(5)
    wider = torch.cat([rows, torch.full_like(rows, REMOVED)], -1)
    size = rows.shape[-1]
    assert torch.equal(applied(PLess, wider)[:, :size], applied(PLess, rows))
    assert not (applied(PLess, wider, norm=True)[:, size:] > REMOVED).any()


def test_it_acts_before_the_other_truncations():
    names = [s.name for s in assemble(LaneConfig("sample", {}, [("p_less", {})])).samplers]
    assert names.index("temperature") < names.index("p_less") < names.index("top_k")
