"""A lane that demonstrates a strategy, found from the strategies' declarations and the gallery's examples."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from playground.contract import Strategy, discover, find
from playground.contract.lane_config import MAIN_KINDS, SINGLE_KINDS, LaneConfig, assemble
from playground.errors import Refusal
from playground.ui import model_menu
from playground.ui.gallery import examples
from playground.ui.settings import Settings

Extras = list[list[Any]]  # [["top_p", {"p": 0.9}]]
PLAIN = "greedy"  # the first decoder tried for toggles
SAMPLING = "temperature"


def settings_for(cls: type[Strategy]) -> Settings | None:
    """Settings with one lane that runs the strategy, over a suitable prompt; None if no lane can hold it.

    The lane is the gallery's if it has one, otherwise the simplest valid one.
    """
    shown = next(((example, lane) for example in examples() for lane in example["lanes"] if _is_about(lane, cls)), None)
    if shown:
        return _over(*shown)
    lane = _lane(cls)
    return _over(_suiting(cls), lane) if lane else None


def _over(example: dict[str, Any], lane: dict[str, Any]) -> Settings:
    return Settings.read({**example, "lanes": [lane]})


def _is_about(lane: dict[str, Any], cls: type[Strategy]) -> bool:
    """Whether a lane shows the strategy. A toggle is hard to see next to a drafter and a verifier, so not there."""
    if lane["strategy"] == cls.name:
        return True
    added = cls.name in [name for name, _ in lane.get("extras", [])]
    return added and (cls.kind in ("drafter", "verifier") or not find(lane["strategy"]).slots())


def _suiting(cls: type[Strategy]) -> dict[str, Any]:
    """The first example with a context if one is needed or compressed, and a model that fills a canvas if the strategy
    does.
    """
    wanted = "context" in cls.needs or getattr(cls, "replaces_prompt", False)
    return next(example for example in examples() if bool(example.get("context")) == wanted
                and model_menu.fills(example.get("model", "")) == (cls.kind == "canvas_decoder"))


def _lane(cls: type[Strategy]) -> dict[str, Any] | None:
    """The first valid lane: with the strategy as decoder, in a slot, or added to a decoder."""
    return next((lane for lane in _candidates(cls) if _is_valid(lane)), None)


def _candidates(cls: type[Strategy]) -> Iterator[dict[str, Any]]:
    if cls.kind in MAIN_KINDS:
        yield {"strategy": cls.name, "extras": _needed(cls)}
        return
    for main in sorted(_of(*MAIN_KINDS), key=lambda main: (main.name != PLAIN, MAIN_KINDS.index(main.kind))):
        if cls.kind in main.slots().values():
            yield from (
                {"strategy": main.name, "extras": [[cls.name, {}], *other, *_sampling(cls)]}
                for other in _others(main, cls.kind)
            )
        elif cls.kind in ("sampler", *SINGLE_KINDS):
            yield {"strategy": main.name, "extras": [[cls.name, {}]]}


def _needed(main: type[Strategy]) -> Extras:
    return [[_of("constraint")[0].name, {}]] if "constraint" in main.needs else []


def _sampling(part: type[Strategy]) -> Extras:
    """Sampling, for a drafter that samples its draft tokens: it does so only in a lane that samples."""
    return [[SAMPLING, {}]] if getattr(part, "drawn", "deterministic") != "deterministic" else []


def _others(main: type[Strategy], kind: str) -> Iterator[Extras]:
    """Ways to fill the slots of other kinds: with their defaults, then with each part in turn."""
    yield []
    for other in set(main.slots().values()) - {kind}:
        yield from ([[part.name, {}]] for part in _of(other))


def _is_valid(lane: dict[str, Any]) -> bool:
    try:
        return bool(assemble(LaneConfig(lane["strategy"], extras=[(name, knobs) for name, knobs in lane["extras"]])))
    except Refusal:
        return False


def _of(*kinds: str) -> list[type[Strategy]]:
    return [cls for cls in discover().values() if cls.kind in kinds]
