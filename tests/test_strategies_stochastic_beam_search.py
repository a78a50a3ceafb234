"""Stochastic beam search samples texts without replacement."""
from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache

import pytest
import torch
from registry import Collapse
from runs import run
from tables import TableModel

from playground.algorithms.search.beams import Offer
from playground.contract import Decoder, find
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from strategies.search import stochastic_beam_search as module
from support.laws import AT_ONE

Stochastic = find("stochastic_beam_search")
COLLAPSES = {
    "stochastic_beam_search": [
        Collapse(LaneConfig("stochastic_beam_search", {"beams": 1}), LaneConfig("greedy", {}, [AT_ONE])),
        Collapse(LaneConfig("stochastic_beam_search", {"beams": 3, "temperature": 0.7}),
                 LaneConfig("greedy", {}, [("temperature", {"t": 0.7})])),
    ],
}
FIRST, SECOND = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.8, 0.15, 0.05], [0.5, 0.3, 0.2]))
MODEL = TableModel("abc", rule=lambda text: FIRST if len(text) == 1 else SECOND)
RUNS, OFF = 250, 0.13  # a frequency of 250 has a standard error of at most 0.032


@cache
def chances() -> dict[tuple[int, int], float]:
    """The model's probability of every text of two tokens."""
    first = MODEL.scores((0,)).softmax(-1).tolist()
    return {(a, b): p * q for a, p in enumerate(first)
            for b, q in enumerate(MODEL.scores((0, a)).softmax(-1).tolist())}


def together() -> dict[frozenset, float]:
    """Probability of each pair of texts, drawn one after the other, the second from what the first left."""
    found: Counter = Counter()
    for (s, p), (t, q) in itertools.permutations(chances().items(), 2):
        found[frozenset((s, t))] += p * q / (1 - p)
    return found


def check_stochastic(cls: type[Decoder]) -> None:
    written, pairs = Counter(), Counter()
    for seed in range(RUNS):
        text, both = sampled(cls, seed)
        written[text] += 1 / RUNS
        pairs[both] += 1 / RUNS
    assert all(abs(written[text] - p) < OFF for text, p in chances().items())
    for text in chances():  # how often a text is one of the two
        expected = sum(p for both, p in together().items() if text in both)
        assert abs(sum(p for both, p in pairs.items() if text in both) - expected) < OFF
    assert all(len(both) == 2 for both in pairs)


def sampled(cls: type[Decoder], seed: int) -> tuple[tuple[int, ...], frozenset]:
    """The text that is written, and the texts of both beams at the end."""
    decoder, finished = cls(beams=2), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compared", lambda beams: finished.extend(tuple(b.leaf.written) for b in beams) or [])
        lane, _ = run(Assembly(decoder, decoder.toggles()), {"target": MODEL}, [0], 2, seed)
    return tuple(lane.main.written), frozenset(finished)


class MostProbableBeams(Stochastic):
    """Wrong: no noise."""

    def children(self, lm, row, beam, place):
        p = row.distribution()
        top = p.topk(self.beams)
        for token, chance in zip(top.indices.tolist(), top.values.tolist()):
            yield Offer(place, token, beam.logp + math.log(chance))


class ForgetsWhatTheBeamIsWorth(Stochastic):
    """Wrong: the location of a child's noise leaves out the text before it."""

    def children(self, lm, row, beam, place):
        score, beam.score, before, beam.logp = beam.score, module.gumbel(0.5), beam.logp, 0.0
        yield from super().children(lm, row, beam, place)
        beam.score, beam.logp = score, before


@pytest.mark.slow
@pytest.mark.oracle("stochastic_beam_search")
def test_texts_are_drawn_without_replacement_and_the_first_is_a_sample():
    check_stochastic(Stochastic)


@pytest.mark.slow
@pytest.mark.refuses("stochastic_beam_search")
@pytest.mark.parametrize("wrong", [MostProbableBeams, ForgetsWhatTheBeamIsWorth])
def test_wrong_stochastic_beams_are_refused(wrong):
    with pytest.raises(AssertionError):
        check_stochastic(wrong)


@pytest.mark.strategy("stochastic_beam_search")
def test_a_conditioned_gumbel_variable_stays_below_its_bound_and_has_its_law():
    """Its distribution function is that of a Gumbel variable divided by its value at the bound."""
    for u in (0.01, 0.3, 0.9, 0.999):
        for location, most in ((0.0, 0.5), (-2.0, 1.0), (3.0, 2.0)):
            x = module.gumbel(u, location, most)
            assert x <= most
            assert math.exp(-math.exp(location - x)) / math.exp(-math.exp(location - most)) == pytest.approx(u)
