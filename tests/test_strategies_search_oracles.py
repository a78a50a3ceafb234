"""Decoders that choose among several texts: each against enumeration over a table model, which needs no decoder at all.

Every strategy has one `check_...(cls)`, written without its code. The strategy passes it, and subclasses with one
mistake fail it. Distributions of texts are exact: `tables.law` sums over every random outcome.
"""
from __future__ import annotations

from itertools import product

import pytest
from runs import run
from tables import TableModel, Text

from playground.algorithms.search.beams import Beams
from playground.contract import Decoder
from strategies.search import beam_search as beam_search_module
from support.search_oracles import PROMPT, BeamSearch, lane_of, logp, refused


def beams_by_the_book(model: TableModel, width: int, exponent: float, length: int) -> Text:
    """Every text in a tuple, every context read again. Finished texts are ranked by sum / length ** exponent."""

    def rank(text: Text) -> float:
        return logp(model, text) / len(text) ** exponent

    live, finished = [()], []
    for _ in range(length):
        offers = [(*text, token) for text in live for token in range(model.vocabulary)]
        offers.sort(key=lambda text: -logp(model, text))
        finished += [text for text in offers[:width] if text[-1] in model.end_ids]
        finished = sorted(finished, key=rank, reverse=True)[:width]
        live = [text for text in offers if text[-1] not in model.end_ids][:width]
        if len(finished) == width and max(map(rank, live)) <= rank(finished[-1]):
            live = []
            break
    return max([*finished, *live], key=rank)


def check_beam_search(cls: type[Decoder]) -> None:
    for seed, (width, exponent) in product(range(5), ((2, 0.0), (3, 1.0), (3, 0.5))):
        model = TableModel("abcd.", ".", seed, spread=0.8)
        lane, _ = run(lane_of(cls(beams=width, length_exponent=exponent)), {"target": model}, PROMPT, 6)
        assert tuple(lane.main.written) == beams_by_the_book(model, width, exponent, 6)


class RanksTheOtherWay(BeamSearch):
    """Multiplies by the length where it should divide."""

    def __post_init__(self):
        self.length_exponent = -self.length_exponent


class OneBeamFewer(BeamSearch):
    def __post_init__(self):
        self.beams -= 1


class ForgetsTheSum(Beams):
    """Scores by the last token's log-probability alone."""

    def choose(self, gains, ends):
        for beam in self.live:
            beam.score = 0.0
        return super().choose(gains, ends)


class EndsCountForNothing(Beams):
    """Collects every text that ends, however improbable it is."""

    def choose(self, gains, ends):
        offers = super().choose(gains, ends)
        return sorted({*offers, *(offer for offer in self.considered if ends(offer.token))}, key=self.considered.index)


@pytest.mark.oracle("beam_search")
def test_beam_search_finds_what_a_search_over_tuples_finds():
    check_beam_search(BeamSearch)


@pytest.mark.refuses("beam_search")
@pytest.mark.parametrize("wrong", [RanksTheOtherWay, OneBeamFewer])
def test_a_wrong_beam_search_is_refused(wrong):
    refused(check_beam_search, wrong)


@pytest.mark.refuses("beam_search")
@pytest.mark.parametrize("wrong", [ForgetsTheSum, EndsCountForNothing])
def test_beams_that_are_chosen_wrongly_are_refused(wrong, monkeypatch):
    monkeypatch.setattr(beam_search_module, "Beams", wrong)
    refused(check_beam_search, BeamSearch)
