"""Lanes that demonstrate a strategy, found from the strategies' declarations and the gallery's examples."""
from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from playground.contract import Strategy, discover, find
from playground.contract.lane_config import MAIN_KINDS, SINGLE_KINDS, LaneConfig, assemble
from playground.errors import Refusal
from playground.ui.components import model_menu
from playground.ui.components.settings import Settings
from playground.ui.play import gallery

Extras = list[list[Any]]  # [["top_p", {"p": 0.9}]]
PLAIN = "greedy"  # the first decoder tried for toggles
SAMPLING = "temperature"
RANDOM = "sample"  # the plain decoder that draws at random


@cache
def examples() -> list[dict[str, Any]]:
    """The gallery's, which nothing here changes. Cached: an entry of the library looks for its strategy in all."""
    return gallery.examples()


def settings_for(cls: type[Strategy]) -> Settings | None:
    """Settings with a lane that runs the strategy beside its plain lane, over a suitable prompt; None if no lane can
    hold it.

    The lane is the gallery's if it has one, otherwise the simplest valid one.
    """
    shown = next(((example, lane) for example in examples() for lane in example["lanes"] if _is_about(lane, cls)), None)
    if shown:
        return _over(*shown)
    lane = _lane(cls)
    return _over(_suiting(cls), lane) if lane else None


def _over(example: dict[str, Any], lane: dict[str, Any]) -> Settings:
    plain = _plain(example, lane)
    return Settings.read({**example, "lanes": [plain, lane] if plain and plain != lane else [lane]})


def _plain(example: dict[str, Any], lane: dict[str, Any]) -> dict[str, Any] | None:
    """What a lane is compared with: the example's plain lane if it has one, otherwise sampling for a lane that draws
    its tokens, else greedy; None beside a canvas, which a plain decoder cannot fill.
    """
    if find(lane["strategy"]).kind == "canvas_decoder":
        return None
    shown = [other for other in example["lanes"] if other["strategy"] in (PLAIN, RANDOM) and not other.get("extras")]
    wanted = RANDOM if _draws(lane) else PLAIN
    if tempered := [extra for extra in lane.get("extras", []) if extra[0] == SAMPLING]:
        return {"strategy": PLAIN, "extras": tempered}  # at the same temperature
    return next((other for other in shown if other["strategy"] == wanted), {"strategy": wanted})


def _draws(lane: dict[str, Any]) -> bool:
    """Whether a lane draws its tokens at random: by a sampler, or by a decoder with a temperature."""
    config = LaneConfig(lane["strategy"], lane.get("knobs", {}), [tuple(extra) for extra in lane.get("extras", [])])
    assembly = assemble(config)
    return any(sampler.draws for sampler in assembly.samplers) or getattr(assembly.decoder, "temperature", 0) > 0


def _is_about(lane: dict[str, Any], cls: type[Strategy]) -> bool:
    """Whether a lane shows the strategy. A toggle is hard to see next to a drafter and a verifier, so not there."""
    if lane["strategy"] == cls.name:
        return True
    added = cls.name in [name for name, _ in lane.get("extras", [])]
    return added and (cls.kind in ("drafter", "verifier") or not find(lane["strategy"]).slots())


def _suiting(cls: type[Strategy]) -> dict[str, Any]:
    """An example with a context if one is needed or compressed, and a model that fills a canvas if the strategy does:
    the first that shows a strategy of the same kind and family, or else of the same kind, or else any.
    """
    wanted = "context" in cls.needs or getattr(cls, "replaces_prompt", False)
    fitting = [example for example in examples() if bool(example.get("context")) == wanted
               and model_menu.fills(example.get("model", "")) == (cls.kind == "canvas_decoder")]
    return max(fitting, key=lambda example: _likeness(example, cls))  # the first of equals


def _likeness(example: dict[str, Any], cls: type[Strategy]) -> int:
    """2 if the example shows a strategy of the same kind and family, 1 if of the same kind, otherwise 0."""
    lanes = example["lanes"]
    names = [name for lane in lanes for name in (lane["strategy"], *(part for part, _ in lane.get("extras", [])))]
    alike = [other for other in map(find, names) if other.kind == cls.kind]
    return 2 if any(other.family() == cls.family() for other in alike) else int(bool(alike))


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
        elif cls.kind in ("sampler", "overlay", *SINGLE_KINDS):
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
