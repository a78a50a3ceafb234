"""The lanes of the benchmark: every lossless drafter and preset of the registry, and their counterparts in the library.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from playground.bench.effects.speculation_effect import AIMS as SHOWN
from playground.bench.speed.text_baselines import DRAFT_DEPTH, LOOKUP_DEPTH, MAX_NGRAM
from playground.bench.survey.survey import Entrant
from playground.contract import Strategy, discover
from playground.errors import Refusal
from playground.lane_fields import LaneConfig

PLAIN = "greedy"
AIMS = {task: aim for task, (_, aim) in SHOWN.items()}  # required speed-up over the plain lane, by task
VERIFIER = ("greedy_match", {})
DEEPER = (12, 20)  # depths of draft model and prompt lookup for tasks with a higher acceptance rate
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "draft_model": [{"depth": DRAFT_DEPTH}, {"depth": DEEPER[0]}, {"depth": 4, "width": 2}],
    "prompt_lookup": [{"depth": LOOKUP_DEPTH, "n_max": MAX_NGRAM}, {"depth": DEEPER[1], "n_max": MAX_NGRAM}],
    # as in its paper, and with fewer draft tokens for a target as fast as the bundled one
    "dyspec": [{}, {"mode": "threshold", "threshold": 0.15}],
    # as in its paper, and without its delayed check
    "specdec_plus_plus": [{}, {"most": 32, "late": False, "predictor": "proxy"}],
    "medusa": [{}, {"nodes": 12}],
    # fitted to this machine, and with costs and a size that are the same everywhere
    "smartspec": [{}, {"costs": "simulated"}],
    "ppd": [{}, {"inputs": 24, "sized": "fixed"}],
    # with a draft that learns, and with one that learns less or nothing
    "online_speculative": [{}, {"scope": "correction"}],
    "omnidraft": [{}, {"lr": 0.0}],
    "eagle_2": [{}, {"nodes": 12, "depth": 4, "width": 3}],
    "layer_skip_draft": [],  # layer_skip is this drafter with its verifier
}
"""Knobs of each row of a strategy. A strategy that is not listed has one row with its defaults."""


@dataclass(frozen=True)
class Pair:
    """A lane of ours and its counterpart in the library, both proposing `depth` tokens per round."""

    ours: str
    kind: Literal["assisted", "prompt lookup"]
    depth: int

    @property
    def theirs(self) -> str:
        return f"generate, {self.kind}, {self.depth}"


PAIRS = (
    *(Pair(f"draft_model:depth={depth}", "assisted", depth) for depth in (DRAFT_DEPTH, DEEPER[0])),
    *(
        Pair(f"prompt_lookup:depth={depth},n_max={MAX_NGRAM}", "prompt lookup", depth)
        for depth in (LOOKUP_DEPTH, DEEPER[1])
    ),
)


def entrants(draft: bool, only: Iterable[str] = (), fitted: Iterable[str] = ()) -> list[Entrant]:
    """The plain lane and the speculative ones; with `only`, those with these names. Raises Refusal for an unknown name.

    Draft heads are measured if they are among `fitted`, those that have weights for the target, or named; decoders with
    a slot for a drafter, which otherwise repeat their default drafter, if they are named.
    """
    classes = {cls.name: cls for cls in discover().values() if _lossless(cls) and (draft or "draft" not in cls.needs)}
    if unknown := next((name for name in only if name not in classes), None):
        raise Refusal(
            f"{unknown} is no lossless speculative strategy here; choose some of {', '.join(classes)}.", "only"
        )
    every = [
        cls for cls in classes.values() if cls.kind != "decoder" and ("trained" not in cls.needs or cls.name in fitted)
    ]
    chosen = [classes[name] for name in dict.fromkeys(only)] or every
    return [Entrant(PLAIN, LaneConfig(PLAIN)), *(Entrant(*lane) for cls in chosen for lane in _lanes(cls))]


def pairs(lanes: Iterable[Entrant]) -> list[Pair]:
    """The pairs whose own lane is among `lanes`."""
    names = {lane.name for lane in lanes}
    return [pair for pair in PAIRS if pair.ours in names]


def _lossless(cls: type[Strategy]) -> bool:
    """Whether it is speculative, leaves a greedy text unchanged, and needs no more than a draft model or a
    draft head.
    """
    lossless = (
        cls.kind == "drafter"
        or cls.kind in ("preset", "decoder")
        and "verifier" in cls.slots().values()
        and "greedy_identical" in cls.guarantee
    )
    return lossless and set(cls.needs) <= {"draft", "trained"}


def _lanes(cls: type[Strategy]) -> list[tuple[str, LaneConfig]]:
    """Name and config for each of its settings; the name is written as on the command line."""
    return [(_spelled(cls.name, knobs), _config(cls, knobs)) for knobs in SETTINGS.get(cls.name, [{}])]


def _config(cls: type[Strategy], knobs: dict[str, Any]) -> LaneConfig:
    return (
        LaneConfig("speculative", extras=[(cls.name, knobs), VERIFIER])
        if cls.kind == "drafter"
        else LaneConfig(cls.name, knobs, [VERIFIER])
    )


def _spelled(name: str, knobs: dict[str, Any]) -> str:
    return ":".join([name, *[",".join(f"{knob}={value}" for knob, value in knobs.items())] * bool(knobs)])
