"""Penalties on tables."""
from __future__ import annotations

import random

from tables import TableModel
from torch import Tensor

from playground.contract import make
from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Silent
from playground.events import Event, Figure, Note


def alone(name: str, **knobs) -> LaneConfig:
    return LaneConfig("greedy", {}, [(name, knobs)])


def texts(count: int = 300, letters: int = 4, longest: int = 24) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(letters) for _ in range(chance.randrange(longest))] for _ in range(count)]


def apply(name: str, scores: Tensor, history: list[int], start: int = 0, **knobs) -> Tensor:
    """One row [V] after a sampler, in a lane whose prompt has `start` tokens and whose tokens read a, b, c, ..."""
    sampler = make(name, **knobs)
    sampler.begin(start, lambda token: chr(ord("a") + token))
    return sampler.apply(scores[None], [history])[0]


def run(config: LaneConfig, model: TableModel, prompt: list[int], length: int) -> tuple[list[int], list[Event]]:
    assembly = assemble(config)
    runner, events = (
        Runner(
            Lane(prompt, {"target": model}, assembly, Limits(max_new_tokens=length), Silent(model.tokens)), assembly
        ),
        [],
    )
    while not runner.finished:
        events += runner.advance()
    return runner.lane.main.written, events


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def spans(events: list[Event], name: str) -> list[list]:
    return [event.data["spans"][0] for event in events if isinstance(event, Figure) and event.name == name]


def ngrams(text: list[int], n: int) -> set[tuple[int, ...]]:
    return {tuple(text[i:i + n]) for i in range(len(text) - n + 1)}


def repeat(text: list[int], token: int, longest: int = 99) -> int:
    """Tokens of the longest n-gram that a token would repeat, itself included; 0 if it is new. By scanning all
    n-grams.
    """
    lengths = [
        n for n in range(1, min(longest, len(text)) + 1) if (*text[len(text) - n + 1 :], token) in ngrams(text, n)
    ]
    return max(lengths, default=0)
