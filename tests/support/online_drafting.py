"""Lanes whose draft has another tokenizer."""
from __future__ import annotations

from collections.abc import Callable

from registry import Collapse

from playground.contract import Drafter, make
from playground.contract.assembly import Assembly
from playground.contract.lane_config import LaneConfig
from playground.events import Event, Figure
from support.laws import AT_ONE
from support.speculation import GREEDY, MODEL


def speculative_lane(drafter: str, *samplers: tuple[str, dict], verifier: str = "rejection", **knobs) -> LaneConfig:
    return LaneConfig("speculative", {}, [(drafter, knobs), (verifier, {}), *samplers])


def collapses(make_config: Callable[..., LaneConfig]) -> list[Collapse]:
    return [Collapse(make_config(), GREEDY), Collapse(make_config(AT_ONE), MODEL)]


def speculation(drafter: Drafter, *samplers: tuple[str, dict], verifier: str = "rejection") -> Assembly:
    decoder = make("speculative", verifier=verifier)
    decoder.drafter = drafter
    return Assembly(decoder, [make(name, **knobs) for name, knobs in samplers])


def figures(recorded: list[Event], name: str) -> list[dict]:
    return [event.data for event in recorded if isinstance(event, Figure) and event.name == name]
