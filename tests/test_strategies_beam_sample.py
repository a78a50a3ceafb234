"""Beam sampling draws its candidates without replacement and keeps the most probable of them."""
from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from tables import Enumerating, TableModel, distance, law

from playground.contract import Decoder, find
from playground.contract.assembly import Assembly
from strategies.search import beam_sample as module
from support.laws import EXACT, WRONG

BeamSample = find("beam_sample")
LENGTH = 2  # tokens
Text = tuple[int, ...]


def logps(model: TableModel, text: Text, t: float) -> list[float]:
    return (model.scores((0, *text)) / t).log_softmax(-1).tolist()


def without_replacement(weights: dict, count: int) -> dict[frozenset, float]:
    """The law of a set of `count` items, drawn one after the other in proportion to their weights."""
    found = {frozenset(): 1.0}
    for _ in range(count):
        following: Counter = Counter()
        for taken, p in found.items():
            rest = {item: w for item, w in weights.items() if item not in taken}
            for item, w in rest.items():
                following[taken | {item}] += p * w / sum(rest.values())
        found = following
    return dict(found)


def expected(model: TableModel, width: int, t: float) -> dict[Text, float]:
    """The law of the text that is written, as a recursion over sets of beams."""
    beams: dict[frozenset, float] = {frozenset([((), 0.0)]): 1.0}
    for _ in range(LENGTH):
        following: Counter = Counter()
        for live, p in beams.items():
            total = {(*text, token): score + gain for text, score in live
                     for token, gain in enumerate(logps(model, text, t))}
            weights = {text: math.exp(score) for text, score in total.items()}
            for drawn, q in without_replacement(weights, min(2 * width, len(weights))).items():
                best = sorted(drawn, key=lambda text: -total[text])[:width]
                following[frozenset((text, total[text]) for text in best)] += p * q
        beams = dict(following)
    found: Counter = Counter()
    for live, p in beams.items():
        found[max(live, key=lambda beam: beam[1])[0]] += p
    return dict(found)


def error(cls: type[Decoder]) -> float:
    """Largest difference from that law."""
    found = []
    for width, letters, t in ((1, "abc", 1.0), (1, "abcd", 0.6)):
        model, decoder = TableModel(letters, seed=3), cls(beams=width, temperature=t)
        lane = Assembly(decoder, decoder.toggles())
        found.append(distance(law(lane, {"target": model}, [0], LENGTH), expected(model, width, t)))
    return max(found)


class TakesTheBest(BeamSample):
    """Wrong: plain beam search."""

    def decode(self, lm):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SampledBeams", module.Beams)
            yield from super().decode(lm)


class OneDrawPerBeam(BeamSample):
    """Wrong: as many candidates as beams, so that none can be improved upon."""

    def decode(self, lm):
        class Fewer(module.SampledBeams):
            def _candidates(self, sums, ends):
                remaining = module.RemainingTokens(sums.flatten().softmax(0))
                place = self.lm.draw_remaining(remaining, self.live[0].leaf.generated, "candidate")
                return [module.Offer(*divmod(place, sums.shape[1]), float(sums.flatten()[place]))]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "SampledBeams", Fewer)
            yield from super().decode(lm)


@pytest.mark.oracle("beam_sample")
def test_the_written_text_has_the_law_of_sampled_candidates():
    assert error(BeamSample) < EXACT


@pytest.mark.refuses("beam_sample")
@pytest.mark.parametrize("wrong", [TakesTheBest, OneDrawPerBeam])
def test_wrong_candidates_are_refused(wrong):
    assert error(wrong) > WRONG


@pytest.mark.oracle("beam_sample")
def test_two_beams_draw_four_of_six_candidates_in_proportion_to_whole_texts():
    sums = torch.tensor([[-0.5, -1.5, -2.0], [-1.0, -3.0, -0.7]], dtype=torch.float64)
    weights, draws, found = dict(enumerate(sums.flatten().exp().tolist())), Enumerating(), Counter()
    for _ in draws.runs():
        beams = module.SampledBeams(SimpleNamespace(generated=0), 2)
        beams.lm = SimpleNamespace(draw_remaining=lambda remaining, position, purpose: draws.take(remaining, "", 0))
        offers = beams._candidates(sums, None)
        scores = [float(sums[offer.place, offer.token]) for offer in offers]
        assert [offer.score for offer in offers] == sorted(scores, reverse=True)
        found[frozenset(offer.place * 3 + offer.token for offer in offers)] += draws.weight
    assert found == pytest.approx(without_replacement(weights, 4))
