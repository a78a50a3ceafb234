"""Samplers that mix in rows from stored texts, against their formulas."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from playground.contract import Sampler
from strategies.sampling.caad import Grounding
from strategies.sampling.knn_lm import Datastore
from support.contrast_oracles import CAAD, KNNLM, WIDTH, Row, V, drawn, refused, softmax


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
