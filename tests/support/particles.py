"""Output distributions of weighted particles under a constraint."""
from __future__ import annotations

import math
from collections import defaultdict

import torch
from tables import Enumerating, Law, TableModel, Text
from toys import byte_tokenizer

from playground.contract import find
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent

TOKENIZER = byte_tokenizer(merges=0)
END, START = TOKENIZER.eos_token_id, TOKENIZER.convert_tokens_to_ids("q")


def ids(text: str) -> Text:
    return tuple(TOKENIZER.convert_tokens_to_ids(list(text)))


def coins(tosses: int, ones: float = 0.5) -> TableModel:
    """A number of coin tosses, then the end."""
    def scores(context: Text) -> torch.Tensor:
        row = torch.full((len(TOKENIZER),), -math.inf, dtype=torch.float64)
        row[list(ids("01"))] = torch.tensor([1 - ones, ones], dtype=torch.float64).log()
        if len(context) > tosses:
            row[:], row[END] = -math.inf, 0.0
        return row
    return TableModel(tokenizer=TOKENIZER, rule=scores)


def steered(config: LaneConfig, model: TableModel, draws, length: int = 12) -> Lane:
    """A lane run to its end, with its events."""
    assembly = assemble(config)
    lane = Lane([START], {"target": model}, assembly, Limits(max_new_tokens=length), Silent(model.tokens))
    lane.draws, lane.recorded = draws, []
    runner = Runner(lane, assembly)
    while not runner.finished:
        lane.recorded += runner.advance()
    return lane


class Witness:
    """The strategy, recording its last population."""

    def __init__(self, config: LaneConfig):
        self.assembly = assemble(config)
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


def weighed_law(config: LaneConfig, model: TableModel, length: int = 8) -> Law:
    """E[mean weight if the answer is y] for every y: the model's probability of y if the weights are right."""
    witness, draws, found = Witness(config), Enumerating(), defaultdict(float)
    for _ in draws.runs():
        text, weight = witness.run(model, draws, length)
        found[text] += draws.weight * weight
    return dict(found)


SKEWED = ("regex", {"pattern": "0{2}|1[01]"})


def legal_chances(ones: float) -> Law:
    chance = {"0": 1 - ones, "1": ones}
    return {(*ids(a + b), END): chance[a] * chance[b] for a, b in ("00", "10", "11")}


def zeros(particles: int, threshold: float) -> float:
    """Probability of the answer 00 among the legal answers of two fair coins."""
    config, draws, found = (
        LaneConfig("smc", {"particles": particles, "threshold": threshold}, [SKEWED]),
        Enumerating(),
        0.0,
    )
    for _ in draws.runs():
        text = steered(config, coins(2), draws).text
        found += draws.weight * (text == "00")
    return found
