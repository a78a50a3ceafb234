"""Who guesses: every lossless drafter and preset of the registry, in a greedy lane, and which of them have a
counterpart in the library.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from playground.bench.baselines import GUESSES, LONGEST, LOOKED_UP
from playground.bench.effects.speculation_effect import AIMS as SHOWN
from playground.bench.survey import Entrant
from playground.contract import Strategy, discover
from playground.contract.lane_config import LaneConfig
from playground.errors import Refusal

PLAIN = "greedy"
AIMS = {task: aim for task, (_, aim) in SHOWN.items()}  # times as fast as the plain lane, by task
VERIFIER = ("greedy_match", {})
FURTHER = (12, 20)  # guesses of the draft model and of prompt lookup where more of them stand
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "draft_model": [{"depth": GUESSES}, {"depth": FURTHER[0]}, {"depth": 4, "width": 2}],
    "prompt_lookup": [{"depth": LOOKED_UP, "n_max": LONGEST}, {"depth": FURTHER[1], "n_max": LONGEST}],
    # as its paper has it, and with fewer guesses, for a target as quick as the bundled one
    "dyspec": [{}, {"mode": "threshold", "threshold": 0.15}],
    "specdec_plus_plus": [{}, {"most": 32, "late": False}],  # as its paper has it, and where nothing has to be late
    "layer_skip_draft": [],  # layer_skip is that drafter, with its verifier
}
"""Knobs of each row that a strategy has; one row with its own defaults where it is not named here."""


@dataclass(frozen=True)
class Pair:
    """A lane of ours and what the library calls the same, both guessing so many tokens at a time."""

    ours: str
    kind: Literal["assisted", "prompt lookup"]
    guesses: int

    @property
    def theirs(self) -> str:
        return f"generate, {self.kind}, {self.guesses}"


PAIRS = (
    *(Pair(f"draft_model:depth={guesses}", "assisted", guesses) for guesses in (GUESSES, FURTHER[0])),
    *(
        Pair(f"prompt_lookup:depth={guesses},n_max={LONGEST}", "prompt lookup", guesses)
        for guesses in (LOOKED_UP, FURTHER[1])
    ),
)


def entrants(draft: bool, only: Iterable[str] = ()) -> list[Entrant]:
    """The plain lane and those that guess; with `only`, those of these names. Raises Refusal for a name that nobody
    has.
    """
    classes = {cls.name: cls for cls in discover().values() if _guesses(cls) and (draft or "draft" not in cls.needs)}
    if unknown := next((name for name in only if name not in classes), None):
        raise Refusal(f"{unknown} does not guess ahead without loss here; choose some of {', '.join(classes)}.", "only")
    chosen = [classes[name] for name in dict.fromkeys(only)] or classes.values()
    return [Entrant(PLAIN, LaneConfig(PLAIN)), *(Entrant(*lane) for cls in chosen for lane in _lanes(cls))]


def pairs(lanes: Iterable[Entrant]) -> list[Pair]:
    """Those whose lane of ours is among them."""
    names = {lane.name for lane in lanes}
    return [pair for pair in PAIRS if pair.ours in names]


def _guesses(cls: type[Strategy]) -> bool:
    """Whether it guesses ahead, changes nothing of a greedy text, and needs no more than a draft model."""
    exact = (
        cls.kind == "drafter"
        or cls.kind == "preset"
        and "verifier" in cls.slots().values()
        and "greedy_identical" in cls.guarantee
    )
    return exact and set(cls.needs) <= {"draft"}


def _lanes(cls: type[Strategy]) -> list[tuple[str, LaneConfig]]:
    """Name and recipe for each of its settings; the name is what the shell takes."""
    return [(_spelled(cls.name, knobs), _recipe(cls, knobs)) for knobs in SETTINGS.get(cls.name, [{}])]


def _recipe(cls: type[Strategy], knobs: dict[str, Any]) -> LaneConfig:
    return (
        LaneConfig("speculative", extras=[(cls.name, knobs), VERIFIER])
        if cls.kind == "drafter"
        else LaneConfig(cls.name, knobs, [VERIFIER])
    )


def _spelled(name: str, knobs: dict[str, Any]) -> str:
    return ":".join([name, *[",".join(f"{knob}={value}" for knob, value in knobs.items())] * bool(knobs)])
