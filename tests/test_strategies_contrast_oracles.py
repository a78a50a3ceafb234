"""Samplers that mix several rows into one: each against its published formula in plain loops over probabilities.

Every strategy has one `check_...(cls)`, written without its code. The strategy passes it, and subclasses with one
mistake fail it. Laws are compared, so a constant added to a whole row makes no difference.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from runs import divergence
from torch import Tensor

from playground.contract import EarlyExit, Sampler
from support.contrast_oracles import CAD, ICD, LOL, AdaCAD, DoLa, Row, V, drawn, refused, softmax


def logs(row: Row) -> Row:
    return [math.log(p) for p in softmax(row)]


def same_laws(found: Tensor, expected: list[Row], within: float = 1e-9) -> None:
    """Both rows of scores have the same probabilities."""
    law = torch.tensor([softmax(row) for row in expected], dtype=torch.float64)
    assert (found.softmax(-1) - law).abs().max() < within


# --- context-aware decoding ---

def amplified(cls: type[Sampler], strength: Callable[[Row, Row], float], **knobs) -> None:
    """Scores are z + alpha (z - z'), z with the context and z' without it."""
    rows = {"target": drawn(0), "without_context": drawn(1)}
    expected = []
    for z, other in zip(*(row.tolist() for row in rows.values())):
        alpha = strength(softmax(z), softmax(other))
        expected.append([a + alpha * (a - b) for a, b in zip(z, other)])
    same_laws(cls(**knobs).mix(rows), expected)


def check_cad(cls: type[Sampler]) -> None:
    for alpha in (-1.0, -0.4, 0.0, 0.5, 2.0):
        amplified(cls, lambda p, q, alpha=alpha: alpha, alpha=alpha)


def check_adacad(cls: type[Sampler]) -> None:
    amplified(cls, divergence)
    amplified(cls, lambda p, q: divergence(p, q) / math.log(2), base="2")
    amplified(cls, lambda p, q: max(divergence(p, q), 0.3), floor=0.3)


class SwapsTheStreams:
    def mix(self, rows):
        return super().mix({"target": rows["without_context"], "without_context": rows["target"]})


class SwappedCAD(SwapsTheStreams, CAD): ...


class Interpolates(CAD):
    def mix(self, rows):
        return (1 - self.alpha) * rows["target"] + self.alpha * rows["without_context"]


class ContrastsProbabilities(CAD):
    def mix(self, rows):
        p, q = (row.softmax(-1) for row in rows.values())
        return (p + self.alpha * (p - q)).clamp(min=1e-12).log()


class SwappedAdaCAD(SwapsTheStreams, AdaCAD): ...


class DistanceForDivergence(AdaCAD):
    def _alpha(self, rows):
        return super()._alpha(rows).sqrt()


class FloorAsCeiling(AdaCAD):
    def _alpha(self, rows):
        floor, self.floor = self.floor, 0.0
        return super()._alpha(rows).clamp(max=floor or math.inf)


class OneStrengthForAll(AdaCAD):
    """Takes the mean divergence of a batch for that of each row."""

    def _alpha(self, rows):
        return super()._alpha(rows).mean().expand(len(rows["target"]))


@pytest.mark.oracle("cad")
def test_cad_amplifies_the_difference_of_two_rows():
    check_cad(CAD)


@pytest.mark.refuses("cad")
@pytest.mark.parametrize("wrong", [SwappedCAD, Interpolates, ContrastsProbabilities])
def test_a_wrong_cad_is_refused(wrong):
    refused(check_cad, wrong)


@pytest.mark.oracle("adacad")
def test_adacad_amplifies_each_row_by_its_own_divergence():
    check_adacad(AdaCAD)


@pytest.mark.refuses("adacad")
@pytest.mark.parametrize("wrong", [SwappedAdaCAD, DistanceForDivergence, FloorAsCeiling, OneStrengthForAll])
def test_a_wrong_adacad_is_refused(wrong):
    refused(check_adacad, wrong)


# --- contrasts among plausible tokens ---

def contrasted(found: Tensor, better: Tensor, scores: list[Row], share: float) -> None:
    """Only tokens with a share of the best one's probability are candidates, ranked by these scores."""
    expected = []
    for z, score in zip(better.tolist(), scores):
        p = softmax(z)
        competing = [chance >= share * max(p) * (1 - 1e-12) for chance in p]
        expected.append([value if allowed else -math.inf for value, allowed in zip(score, competing)])
    same_laws(found, expected, 1e-4)  # a tie is broken by a millionth of the model's own log-probability


def on_the_bar() -> Tensor:
    """Rows with exact halves as probabilities, so that tokens are exactly on a threshold of one half; and random ones.
    """
    halves = torch.tensor([[0.0, -1.0, -1.0, *[-6.0] * (V - 3)]], dtype=torch.float64) * math.log(2)
    return torch.cat([halves, drawn(0)])


def check_icd(cls: type[Sampler]) -> None:
    rows = {"target": on_the_bar(), "induced": drawn(1, V + 1)}
    scores = [[a - b for a, b in zip(logs(z), logs(y))] for z, y in zip(*(row.tolist() for row in rows.values()))]
    for rho in (0.0, 0.1, 0.5):
        contrasted(cls(rho=rho).mix(rows), rows["target"], scores, rho)


class InducedAgainstOwn(ICD):
    def mix(self, rows):
        return super().mix({"target": rows["induced"], "induced": rows["target"]})


class EveryTokenCompetes(ICD):
    def mix(self, rows):
        return rows["target"].log_softmax(-1) - rows["induced"].log_softmax(-1)


class PlausibleToTheInduced(ICD):
    def mix(self, rows):
        p = rows["induced"].softmax(-1)
        scores = rows["target"].log_softmax(-1) - rows["induced"].log_softmax(-1)
        return scores.masked_fill(p < self.rho * p.amax(-1, keepdim=True), -1e4)


class ScoresByTheModelAlone(ICD):
    def mix(self, rows):
        return super().mix(rows | {"induced": torch.zeros_like(rows["induced"])})


@pytest.mark.oracle("icd")
def test_icd_subtracts_the_induced_row_among_plausible_tokens():
    check_icd(ICD)


@pytest.mark.refuses("icd")
@pytest.mark.parametrize("wrong", [InducedAgainstOwn, EveryTokenCompetes, PlausibleToTheInduced, ScoresByTheModelAlone])
def test_a_wrong_icd_is_refused(wrong):
    refused(check_icd, wrong)


def check_lol(cls: type[Sampler]) -> None:
    """(1 + gamma) ln r - gamma ln p - ln a + omega (ln p_l - ln a_l), for the layer at a share of the depth."""
    for omega, gamma in ((0.5, 0.5), (2.0, -1.0), (0.0, 1.0)):
        lol = cls(omega=omega, gamma=gamma, layer=0.75)
        lol.inner(8, False)
        names = ["target", "refocused", "induced", EarlyExit("target", 6), EarlyExit("induced", 6)]
        rows = {EarlyExit(stream, layer): drawn(20 + layer) for stream in ("target", "induced") for layer in range(9)}
        rows |= {name: drawn(seed) for seed, name in enumerate(names)}
        scores = []
        for p, r, a, low_p, low_a in zip(*([logs(row) for row in rows[name].tolist()] for name in names)):
            columns = zip(p, r, a, low_p, low_a)
            scores.append([(1 + gamma) * r - gamma * p - a + omega * (lp - la) for p, r, a, lp, la in columns])
        contrasted(lol.mix(rows), rows["target"], scores, 0.1)


class OneLayerLower(LOL):
    def inner(self, depth, tied):
        return super().inner(depth - 2, tied)


class LowerLayerTheOtherWay(LOL):
    def _parts(self, rows):
        upper, lower = super()._parts(rows)
        return upper, -lower


class RefocusesThePrompt(LOL):
    """Amplifies the prompt's row against that with the instruction, the wrong way round."""

    def _parts(self, rows):
        return super()._parts(rows | {"target": rows["refocused"], "refocused": rows["target"]})


class CountsTheLowerLayerOnce(LOL):
    def mix(self, rows):
        self.omega = min(self.omega, 1.0)
        return super().mix(rows)


@pytest.mark.oracle("lol")
def test_lol_is_the_sum_of_its_three_contrasts():
    check_lol(LOL)


@pytest.mark.refuses("lol")
@pytest.mark.parametrize("wrong", [OneLayerLower, LowerLayerTheOtherWay, RefocusesThePrompt, CountsTheLowerLayerOnce])
def test_a_wrong_lol_is_refused(wrong):
    refused(check_lol, wrong)


def mixture_first(p: Row, q: Row) -> float:
    """The divergence of the authors' code: the mean of KL(m || p) and KL(m || q), m the mixture."""
    return sum(0.5 * m * (math.log(m / a) + math.log(m / b)) for a, b in zip(p, q) for m in [(a + b) / 2])


def check_dola(cls: type[Sampler]) -> None:
    """Each row minus that of the candidate layer that diverges most from it."""
    for name, measure in (("mixture first", mixture_first), ("Jensen-Shannon", divergence)):
        dola = cls(layers="low", divergence=name)
        exits = dola.inner(16, False)
        assert [exit.layer for exit in exits] == [0, 2, 4, 6]
        rows = {"target": drawn(9)} | {exit: drawn(seed) * (1 + seed) for seed, exit in enumerate(exits)}
        scores = []
        for i, z in enumerate(rows["target"].tolist()):
            early = max((rows[exit][i].tolist() for exit in exits), key=lambda y: measure(softmax(z), softmax(y)))
            scores.append([a - b for a, b in zip(logs(z), logs(early))])
        contrasted(dola.mix(rows), rows["target"], scores, 0.1)


class LeastDivergent(DoLa):
    def _divergences(self, rows):
        return -super()._divergences(rows)


class LayerOfTheFirstRow(DoLa):
    """Chooses one layer for a whole batch."""

    def _divergences(self, rows):
        return super()._divergences(rows)[:, :1].expand(-1, len(rows["target"]))


class TheOtherDivergence(DoLa):
    def _divergences(self, rows):
        given = self.divergence
        self.divergence = "Jensen-Shannon" if given == "mixture first" else "mixture first"
        found = super()._divergences(rows)
        self.divergence = given
        return found


class EveryLayer(DoLa):
    def inner(self, depth, tied):
        self.exits = [EarlyExit("target", layer, self.norm) for layer in range(depth // 2)]
        return self.exits


@pytest.mark.oracle("dola")
def test_dola_subtracts_the_most_divergent_layer_row_by_row():
    check_dola(DoLa)


@pytest.mark.refuses("dola")
@pytest.mark.parametrize("wrong", [LeastDivergent, LayerOfTheFirstRow, TheOtherDivergence, EveryLayer])
def test_a_wrong_dola_is_refused(wrong):
    refused(check_dola, wrong)
