"""Random tables of proposals, and the law of the texts that fill a canvas."""
from __future__ import annotations

from collections import Counter

import torch
from tables import Enumerating, Letters

from playground.algorithms.diffusion.proposals import Proposals
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.canvas import Canvas
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.engine.canvas.table_denoiser import OracleDenoiser
from support.canvases import LENGTH

BLOCK = dict(block_length=LENGTH)


def proposals(*confidence: float) -> Proposals:
    return Proposals(dict.fromkeys(range(len(confidence)), 0), dict(enumerate(confidence)))


def random_table(letters: int, length: int, seed: int = 0) -> torch.Tensor:
    scores = torch.randn([letters] * length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5
    return scores.flatten().softmax(0).view_as(scores)


def over(table: torch.Tensor) -> OracleDenoiser:
    return OracleDenoiser.from_table(table, Letters("abcd"[:len(table)], frozenset()))


def law(table: torch.Tensor, strategy) -> dict:
    """Exact probability of every string the strategy may write, by going through all draws."""
    model, draws, found = over(table), Enumerating(), Counter()
    for _ in draws.runs():
        assembly = assemble(LaneConfig(strategy.name, strategy.values()))
        assembly.decoder = strategy
        lane = Canvas([], {"target": model}, assembly, Limits(), Silent(model.tokens))
        lane.draws = draws
        runner = Runner(lane, assembly)
        while not runner.finished:
            runner.advance()
        found[tuple(lane.ids)] += draws.weight
    return dict(found)


def law_of(table: torch.Tensor) -> dict:
    return {tuple(text): float(table[tuple(text)]) for text in torch.ones_like(table).nonzero().tolist()}
