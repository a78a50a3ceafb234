"""Clocks and lanes side by side."""
from __future__ import annotations

from collections.abc import Sequence

from tables import TableModel

from playground.contract import Decoder
from playground.contract.assembly import Assembly
from playground.decoding.lane import Lane
from playground.decoding.lane_runner import Runner
from playground.decoding.limits import Limits
from playground.decoding.recorder import Recorder
from playground.decoding.session import Session
from playground.events import Header

MODEL = TableModel("abcde")
LENGTH = 6


def side_by_side(
    *decoders: Decoder, length: int = LENGTH, model: TableModel | None = MODEL, prompt: Sequence[int] = (0, 1, 2)
) -> Session:
    """A session of unregistered decoders with one shared model, or one model each if none is given."""
    assemblies = [Assembly(decoder) for decoder in decoders]
    lanes = [
        Lane(
            list(prompt),
            {"target": model or TableModel("abcde")},
            assembly,
            Limits(max_new_tokens=length),
            Recorder(MODEL.tokens),
        )
        for assembly in assemblies
    ]
    return Session(
        [Header(lane=i) for i in range(len(decoders))],
        [Runner(lane, assembly) for lane, assembly in zip(lanes, assemblies)],
    )


class Clock:
    """A clock that advances by one second per reading, so each request takes one second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now
