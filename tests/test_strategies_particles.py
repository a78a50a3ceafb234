"""Sequences that are weighed and drawn again, against the law they should have."""
from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from pairs import pair
from tables import Enumerating, Law, TableModel, Text, distance
from test_strategies_search import run
from toys import byte_tokenizer

from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.decoding.rng import Draws
from playground.decoding.session import Runner
from playground.engine.forward_input import ForwardInput
from playground.events import Branches, Figure, Forward

EXACT, WRONG = 1e-9, 1e-3


TOKENIZER = byte_tokenizer(merges=0)
END, START = TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("q")


def ids(text: str) -> Text:
    return tuple(TOKENIZER.convert_tokens_to_ids(list(text)))


def coins(tosses: int, ones: float = 0.5) -> TableModel:
    """So many tosses of a coin, then the end."""
    def scores(context: Text) -> torch.Tensor:
        row = torch.full((len(TOKENIZER),), -math.inf, dtype=torch.float64)
        row[list(ids("01"))] = torch.tensor([1 - ones, ones], dtype=torch.float64).log()
        if len(context) > tosses:
            row[:], row[END] = -math.inf, 0.0
        return row
    return TableModel(tokenizer=TOKENIZER, rule=scores)


def steered(recipe: LaneConfig, model: TableModel, draws, length: int = 12) -> Lane:
    """One lane to its end, and what it told."""
    assembly = assemble(recipe)
    lane = Lane([START], {"target": model}, assembly, Limits(max_new_tokens=length), Silent(model.tokens))
    lane.draws, lane.told = draws, []
    runner = Runner(lane, assembly)
    while not runner.finished:
        lane.told += runner.advance()
    return lane


class Witness:
    """The strategy with its last population looked at."""

    def __init__(self, recipe: LaneConfig):
        self.assembly = assemble(recipe)
        self.mean = find("smc").decode.__globals__["mean"]

    def run(self, model: TableModel, draws, length: int) -> tuple[Text, float]:
        seen, decoder = [], self.assembly.decoder
        inner = type(decoder)._chosen

        def chosen(lm, texts):
            seen.append(math.exp(self.mean(texts)))
            return inner(decoder, lm, texts)

        decoder._chosen = chosen
        lane = Lane([START], {"target": model}, self.assembly, Limits(max_new_tokens=length), Silent(model.tokens))
        lane.draws, runner = draws, Runner(lane, self.assembly)
        while not runner.finished:
            runner.advance()
        return tuple(lane.main.written), seen[-1]


def weighed_law(recipe: LaneConfig, model: TableModel, length: int = 8) -> Law:
    """E[mean weight, where the answer is y] for every y: exactly the model's own chance of y if the weights are right.
    """
    witness, draws, found = Witness(recipe), Enumerating(), defaultdict(float)
    for _ in draws.runs():
        text, weight = witness.run(model, draws, length)
        found[text] += draws.weight * weight
    return dict(found)


SKEWED = ("regex", {"pattern": "0{2}|1[01]"})


def legal_chances(ones: float) -> Law:
    chance = {"0": 1 - ones, "1": ones}
    return {(*ids(a + b), END): chance[a] * chance[b] for a, b in ("00", "10", "11")}


@pytest.mark.oracle("smc")
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("particles", [1, 2])
def test_the_mean_weight_times_the_answer_is_on_average_the_models_own_chance_of_it(particles, threshold):
    found = weighed_law(LaneConfig("smc", {"particles": particles, "threshold": threshold}, [SKEWED]), coins(2, 0.3))
    assert distance(found, legal_chances(0.3)) < EXACT


@pytest.mark.refuses("smc")
@pytest.mark.parametrize("wrong", ["keeps weights after drawing anew", "forgets the legal mass"])
def test_weights_that_are_wrong_are_found_out(wrong, monkeypatch):
    smc = find("smc")
    if wrong.startswith("keeps"):
        redrawn = smc._redrawn

        def kept(self, lm, texts):
            heaviest = max(particle.weight for particle in texts)
            copies = redrawn(self, lm, texts)
            for copy in copies:
                copy.weight = heaviest
            return copies

        monkeypatch.setattr(smc, "_redrawn", kept)
    else:
        step = smc._step

        def blind(self, lm, particle, rows):
            choice = step(self, lm, particle, rows)
            particle.weight = 0.0
            return choice

        monkeypatch.setattr(smc, "_step", blind)
    found = weighed_law(LaneConfig("smc", {"particles": 2, "threshold": 1.0}, [SKEWED]), coins(2, 0.3))
    assert distance(found, legal_chances(0.3)) > WRONG


def zeros(particles: int, threshold: float) -> float:
    """Probability that the answer is 00, of all that is legal of two fair coins."""
    recipe, draws, found = (
        LaneConfig("smc", {"particles": particles, "threshold": threshold}, [SKEWED]),
        Enumerating(),
        0.0,
    )
    for _ in draws.runs():
        text = steered(recipe, coins(2), draws).text
        found += draws.weight * (text == "00")
    return found


def test_one_text_is_drawn_as_under_a_plain_mask_and_more_come_nearer_to_what_the_model_would():
    """A mask says 1/2, the model's own law 1/3."""
    assert zeros(1, 0.0) == pytest.approx(1 / 2)
    by_importance = [zeros(particles, 0.0) for particles in (1, 2, 3)]
    assert by_importance == sorted(by_importance, reverse=True) and 1 / 3 < by_importance[-1] < 0.42
    assert 1 / 3 < zeros(2, 1.0) < 1 / 2


def test_where_everything_is_legal_all_weights_stay_equal_and_nothing_is_drawn_anew():
    lane = steered(
        LaneConfig("smc", {"particles": 5, "threshold": 1.0}, [("regex", {"pattern": "[01]{3}"})]), coins(3), Draws(0)
    )
    figures = [
        event.data["series"]["texts that count"]
        for event in lane.told
        if isinstance(event, Figure) and event.name == "effective number of texts"
    ]
    assert figures == pytest.approx([5.0] * 4) and not [
        event for event in lane.told if isinstance(event, Branches) and event.dropped
    ]


def test_a_text_drawn_anew_reads_on_as_if_it_had_been_alone():
    """On a real network: rows of copies are those of the whole text read from scratch."""
    model, recipe = (
        pair("llama").target,
        LaneConfig("smc", {"particles": 6, "threshold": 1.0}, [("regex", {"pattern": "(ab|cd|efg){2,9}"})]),
    )
    told = run(recipe, model, [54, 71, 9], 10, seed=4)
    assert any(event.dropped for event in told.of(Branches)), "nothing was drawn anew, so this says nothing"
    text = told.texts()[0]
    store = model.new_store()
    tokens = [54, 71, 9, *text]
    rows = model.forward([ForwardInput(store, tokens, list(range(-1, len(tokens) - 1)))])[0][0].log_softmax(-1)
    expected = [float(rows[2 + i, token]) for i, token in enumerate(text)]
    assert told.lane.main.logprobs == pytest.approx(expected, abs=1e-6)


def test_all_forwards_of_a_step_are_one():
    lane = steered(LaneConfig("smc", {"particles": 7}, [("regex", {"pattern": "0{3}|1[01]{2}"})]), coins(3), Draws(1))
    assert len([event for event in lane.told if isinstance(event, Forward)]) == len(lane.main.written)
