"""Runs of strategies that look ahead."""
from __future__ import annotations

from playground.contract.lane_config import LaneConfig, assemble
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.events import Event, Figure


def contrastive(**knobs) -> LaneConfig:
    return LaneConfig("contrastive_search", knobs)


def run(config: LaneConfig, models: dict, prompt: list[int], length: int, seed: int = 0) -> tuple[Lane, list[Event]]:
    assembly = assemble(config)
    runner = Runner(Lane(prompt, models, assembly, Limits(seed, length), Recorder(models["target"].tokens)), assembly)
    events = []
    while not runner.finished:
        events += runner.advance()
    return runner.lane, events


def figures(events: list[Event], name: str) -> list[dict]:
    return [event.data for event in events if isinstance(event, Figure) and event.name == name]
