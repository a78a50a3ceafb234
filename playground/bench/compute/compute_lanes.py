"""The lanes that are compared: plain greedy decoding, and each compute policy at several settings."""
from __future__ import annotations

from typing import Any

from playground.bench.survey.survey import Entrant
from playground.contract import discover, find
from playground.errors import Refusal
from playground.lane_fields import LaneConfig

PLAIN = "greedy"
SETTINGS: dict[str, list[dict[str, Any]]] = {  # from the least that is left out to the most
    "ffn_skip": [{"threshold": 0.99}, {}, {"threshold": 0.95, "run": 0}, {"threshold": -1.0, "run": 0}],
    "cfsp": [{"ratio": ratio} for ratio in (0.1, 0.2, 0.35, 0.5)],
    "acm": [{}, {"budget": "0.25"}, {"mode": "fixed", "k": 2}],
    "first_router": [{"threshold": 0.3}, {}, {"adapters": False}],
    "ftp": [{"r": 0.1}, {}, {"r": 0.3}, {"r": 0.3, "router": "static"}],
    "duo_llm": [{}, {"target": "0.4"}, {"target": "0.25"}, {"mode": "small"}],
    "blockffn": [{}, {"theta": 0.3}, {"theta": 0.4}],
    "factor_llm": [{"run": 3}, {}, {"choice": "oracle"}],
    "phatgoose": [{}, {"k": 1}],
    "stop_exit": [{}, {"theta_exit": 0.98}, {"theta_exit": 0.9}],
    "evopress": [{"sparsity": sparsity} for sparsity in (0.125, 0.25, 0.375, 0.5)],
}


def policies() -> list[str]:
    """Names of all compute policies."""
    return [name for name, cls in discover().items() if cls.kind == "compute_policy"]


def entrants(only: list[str] | None = None) -> list[Entrant]:
    """Plain decoding first, then every policy, or only these, at its settings. Raises Refusal for another kind."""
    for name in only or ():
        if find(name).kind != "compute_policy":
            raise Refusal(f"{name} is no compute policy: choose one of {', '.join(policies())}.", "only")
    lanes = [
        Entrant(_title(name, knobs), LaneConfig("greedy", {}, [(name, dict(knobs))]))
        for name in only or policies()
        for knobs in SETTINGS.get(name, [{}])
    ]
    return [Entrant(PLAIN, LaneConfig("greedy")), *lanes]


def policy_of(entrant: str) -> str:
    """The policy of an entrant of this name."""
    return entrant.partition(" ")[0]


def _title(name: str, knobs: dict[str, Any]) -> str:
    return " ".join([name, *(f"{knob}={value}" for knob, value in knobs.items())])
