"""Lanes run to their end with their events, and random rows to test samplers with."""
from __future__ import annotations

import math

import torch
from pairs import pair
from tables import without_context
from torch import Tensor

from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.recorder import Recorder
from playground.decoding.session import prepare
from playground.events import Commit, Event, Figure

CONTEXT, QUESTION = "The red fox listens, and the green bird sings.", "The green bird"


def alone(name: str, **knobs) -> LaneConfig:
    return LaneConfig("greedy", {}, [(name, knobs)])


def run(
    lane: LaneConfig | Assembly,
    models: dict,
    prompt: list[int],
    length: int,
    seed: int = 0,
    other: list[int] | None = None,
) -> tuple[Lane, list[Event]]:
    """A lane run to its end and its events; `other` is the prompt of the stream without context."""
    assembly = lane if isinstance(lane, Assembly) else assemble(lane)
    prompts = {name: other or without_context(prompt) for name in assembly.prompts()}
    runner = Runner(
        Lane(prompt, models, assembly, Limits(seed, length), Recorder(models["target"].tokens), prompts), assembly
    )
    events = []
    while not runner.finished:
        events += runner.advance()
    return runner.lane, events


def written(*case, **more) -> list[int]:
    return run(*case, **more)[0].main.written


def recorded(
    config: LaneConfig, prompt: Prompt, architecture: str = "llama", length: int = 12
) -> tuple[list[int], list[Event]]:
    session = prepare(pair(architecture), [config], prompt, Limits(0, length))
    events = [stamped.event for stamped in session]
    return [token for event in events if isinstance(event, Commit) for token in event.ids], events


def figures(events: list[Event], name: str) -> list[dict]:
    return [event.data for event in events if isinstance(event, Figure) and event.name == name]


def series(events: list[Event], name: str, line: str) -> list[float]:
    return [data["series"][line] for data in figures(events, name)]


def same(found: list[float], expected: list[float], within: float = 1e-9) -> bool:
    return len(found) == len(expected) and all(abs(a - b) < within for a, b in zip(found, expected))


def rows(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def random_rows(seed: int = 0, count: int = 40, size: int = 30) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def divergence(p: list[float], q: list[float]) -> float:
    """Jensen-Shannon by its definition, in nats."""
    middle = [(a + b) / 2 for a, b in zip(p, q)]
    return sum(0.5 * a * math.log(a / m) for half in (p, q) for a, m in zip(half, middle) if a > 0)
