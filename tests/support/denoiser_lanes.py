"""Lanes over tables that fill canvases."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from tables import Law, Letters
from torch import Tensor

from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.canvas import Canvas
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.session import Session
from playground.engine.canvas.table_denoiser import OracleDenoiser
from playground.events import Commit, Event, Failed, Forward, Header

ORDERS = ("low_confidence", "margin", "entropy", "left_to_right", "random")
ORACLE = OracleDenoiser.bundled()


def random_table(letters: int, length: int, seed: int = 0) -> Tensor:
    """Probabilities of all strings, an axis for each position."""
    scores = torch.randn([letters] * length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5
    return scores.flatten().softmax(0).view_as(scores)


def over(table: Tensor) -> OracleDenoiser:
    return OracleDenoiser.from_table(table, Letters("abcd"[:len(table)], frozenset()))


def canvas(model: OracleDenoiser, assembly, prompt: list[int] = [], seed: int = 0) -> Canvas:  # noqa: B006
    return Canvas(prompt, {"target": model}, assembly, Limits(seed), Recorder(model.tokens))


def session(model: OracleDenoiser, *configs: LaneConfig, prompt: Sequence[int] = (), seed: int = 0) -> Session:
    """Lanes side by side, run to their end."""
    assemblies = [assemble(config) for config in configs]
    lanes = [canvas(model, assembly, list(prompt), seed) for assembly in assemblies]
    runners = [Runner(lane, assembly) for lane, assembly in zip(lanes, assemblies)]
    run = Session([Header(lane=i) for i in range(len(runners))], runners)
    for _ in run:
        pass
    return run


def recorded(model: OracleDenoiser, prompt: list[int] = [], seed: int = 0, **knobs) -> list[Event]:  # noqa: B006
    """Events of one lane."""
    events = [
        stamped.event
        for stamped in session(model, LaneConfig("masked_diffusion", knobs), prompt=prompt, seed=seed).trace.events
    ]
    assert not [event for event in events if isinstance(event, Failed)], events[-1]
    return events


def passes(events: list[Event]) -> int:
    return sum(isinstance(event, Forward) for event in events)


def answer(events: list[Event]) -> str:
    (commit,) = [event for event in events if isinstance(event, Commit)]
    return commit.text


def law_of(table: Tensor) -> Law:
    return {text: float(table[text]) for text in product(range(len(table)), repeat=table.ndim)}


def conditional(table: Tensor, revealed: dict[int, int], position: int) -> list[float]:
    """p(token at position | revealed tokens), by going through all strings."""
    found = [0.0] * len(table)
    for text, p in law_of(table).items():
        if all(text[i] == token for i, token in revealed.items()):
            found[text[position]] += p
    return [p / sum(found) for p in found]
