"""Samplers that mix several rows into one: each against its published formula in plain loops over probabilities.

Every strategy has one `check_...(cls)`, written without its code. The strategy passes it, and subclasses with one
mistake fail it. Laws are compared, so a constant added to a whole row makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from runs import divergence
from torch import Tensor

from playground.contract import EarlyExit, Sampler, find
from strategies.sampling.caad import Grounding
from strategies.sampling.knn_lm import Datastore

CAAD, CAD, DoLa, ICD, KNNLM, LOL, AdaCAD = (
    find(name) for name in ("caad", "cad", "dola", "icd", "knn_lm", "lol", "adacad")
)
V, WIDTH = 12, 4
Row = list[float]


def drawn(seed: int, count: int = 12, size: int = V) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5


def softmax(row: Row) -> Row:
    weights = [math.exp(score - max(row)) for score in row]
    return [weight / sum(weights) for weight in weights]


def logs(row: Row) -> Row:
    return [math.log(p) for p in softmax(row)]


def same_laws(found: Tensor, expected: list[Row], within: float = 1e-9) -> None:
    """Both rows of scores have the same probabilities."""
    law = torch.tensor([softmax(row) for row in expected], dtype=torch.float64)
    assert (found.softmax(-1) - law).abs().max() < within


def refused(check: Callable, wrong: type[Sampler]) -> None:
    with pytest.raises(AssertionError):
        check(wrong)


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


# --- rows from stored texts ---


def squared(a: Row, b: Row) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b))


IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]  # the text that is stored
KEYS = drawn(7, len(IDS) - 1, WIDTH)


def votes(state: Row, k: int, t: float) -> Row:
    """Softmax of negative squared distances over the k nearest states, summed by the token that followed each."""
    keys = KEYS.tolist()
    usual = sorted(min(squared(key, other) for other in keys if other is not key) for key in keys)[(len(keys) - 1) // 2]
    near = sorted((squared(state, key), place) for place, key in enumerate(keys))[:k]
    weights = [math.exp(-distance / (t * usual)) for distance, _ in near]
    return [sum(w for w, (_, at) in zip(weights, near) if IDS[at + 1] == v) / sum(weights) for v in range(V)]


def check_knn_lm(cls: type[Sampler]) -> None:
    """(1 - lam) p + lam p_kNN, as probabilities."""
    rows = {"target": drawn(0), "hidden": drawn(8, size=WIDTH)}
    for lam, k, t in ((0.25, 3, 1.0), (0.9, 1, 1.0), (0.5, 8, 5.0), (0.3, 1000, 2.0)):
        knn = cls(lam=lam, k=k, t=t)
        knn.store = Datastore(KEYS, IDS, torch.arange(len(IDS) - 1))
        expected = []
        for z, state in zip(rows["target"].tolist(), rows["hidden"].tolist()):
            expected.append([(1 - lam) * p + lam * q for p, q in zip(softmax(z), votes(state, k, t))])
        assert (knn.mix(rows).exp() - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-9


class MixesLogits(KNNLM):
    def mix(self, rows):
        near = self.neighbours(rows["hidden"], V).p.clamp(min=1e-9).log()
        return ((1 - self.lam) * rows["target"].log_softmax(-1) + self.lam * near).log_softmax(-1)


class FurthestNeighbours(KNNLM):
    def neighbours(self, states, vocabulary):
        return super().neighbours(-states, vocabulary)


class OneNeighbourMore(KNNLM):
    def neighbours(self, states, vocabulary):
        self.k += 1
        return super().neighbours(states, vocabulary)


class VotesForThePlaceItself(KNNLM):
    """Takes the token at a position for the one that follows it."""

    def neighbours(self, states, vocabulary):
        object.__setattr__(self.store, "values", torch.tensor(self.store.ids)[self.store.places])
        return super().neighbours(states, vocabulary)


class DistancesNotSquared(KNNLM):
    def neighbours(self, states, vocabulary):
        near = super().neighbours(states, vocabulary)
        weights = (-near.distances.sqrt() / (self.t * self.store.scale)).softmax(-1)
        p = torch.zeros_like(near.p).scatter_add(1, self.store.values[near.at], weights)
        return replace(near, p=p, weights=weights)


@pytest.mark.oracle("knn_lm")
def test_knn_lm_mixes_in_the_votes_of_the_nearest_neighbours():
    check_knn_lm(KNNLM)


@pytest.mark.refuses("knn_lm")
@pytest.mark.parametrize(
    "wrong", [MixesLogits, FurthestNeighbours, OneNeighbourMore, VotesForThePlaceItself, DistancesNotSquared]
)
def test_a_wrong_knn_lm_is_refused(wrong):
    refused(check_knn_lm, wrong)


ENTRIES = drawn(5, 9, WIDTH)  # states of stored positions
STORED = drawn(6, 9)  # and the logits the model had there


def cosine(a: Row, b: Row) -> float:
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(squared(a, [0.0] * WIDTH) * squared(b, [0.0] * WIDTH))


def grounded(z: Row, state: Row, alpha: float, tau: float, weighted: bool, most: int) -> Row:
    """z + alpha * mean logits of the entries more similar than tau, states taken less their mean over the entries."""
    mean = [sum(column) / len(column) for column in zip(*ENTRIES.tolist())]
    centred = [[x - m for x, m in zip(entry, mean)] for entry in [state, *ENTRIES.tolist()]]
    similar = sorted(((cosine(centred[0], entry), at) for at, entry in enumerate(centred[1:])), reverse=True)
    near = [(s, at) for s, at in similar[: most or None] if s > tau]
    total = sum(s if weighted else 1 for s, _ in near)
    return [
        x + alpha * sum((s if weighted else 1) / total * float(STORED[at, v]) for s, at in near)
        for v, x in enumerate(z)
    ]


def check_caad(cls: type[Sampler]) -> None:
    rows = {"target": drawn(0), "hidden": drawn(8, size=WIDTH)}
    for alpha, tau, weighted, most in ((0.5, 0.2, True, 0), (1.5, 0.1, False, 0), (0.8, 0.0, True, 2)):
        caad = cls(alpha=alpha, tau=tau, weighted=weighted, most=most)
        caad.grounding = Grounding(ENTRIES, STORED, [""] * len(ENTRIES))
        expected = [
            grounded(z, state, alpha, tau, weighted, most)
            for z, state in zip(rows["target"].tolist(), rows["hidden"].tolist())
        ]
        assert (caad.mix(rows) - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-6


class EveryEntryCounts(CAAD):
    def _weights(self, similarities):
        self.tau = -1.0
        return super()._weights(similarities)


class EvenlyWeighted(CAAD):
    def _weights(self, similarities):
        self.weighted = False
        return super()._weights(similarities)


class SumsTheEntries(CAAD):
    """Does not divide by the sum of the weights."""

    def _weights(self, similarities):
        return super()._weights(similarities) * (similarities > self.tau).sum(-1, keepdim=True)


class StatesAsTheyAre(CAAD):
    """Takes cosines of states without their common mean."""

    def mix(self, rows):
        self.grounding._mean = torch.zeros(WIDTH, dtype=torch.float64)
        self.grounding._keys = ENTRIES / ENTRIES.norm(dim=-1, keepdim=True)
        return super().mix(rows)


@pytest.mark.oracle("caad")
def test_caad_adds_the_mean_logits_of_similar_positions():
    check_caad(CAAD)


@pytest.mark.refuses("caad")
@pytest.mark.parametrize("wrong", [EveryEntryCounts, EvenlyWeighted, SumsTheEntries, StatesAsTheyAre])
def test_a_wrong_caad_is_refused(wrong):
    refused(check_caad, wrong)
