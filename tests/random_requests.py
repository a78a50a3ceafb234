"""Random lanes for load and soak tests, drawn from what strategies declare (`playground.contract.metadata.facts` or the
endpoint `strategies`).
"""
from __future__ import annotations

import random
from typing import Any

Facts = dict[str, Any]
TOGGLES = ("sampler", "constraint", "cache_policy", "compute_policy")
PROMPTS = (
    "The green bird",
    "Once there was a small fox who",
    "Tom has 3 apples and",
    "Write a list of colours:",
    "What is 2 + 3?",
    "The red fox and the old owl went to the river to",
    "if x > 3:",
    "A very long day began when the sun",
)
CONTEXT = "Anna lives in Rome. She has a blue boat and two cats."


def random_lane(facts: list[Facts], chance: random.Random, main: Facts | None = None) -> dict[str, Any]:
    """One lane: a decoder or a preset with up to two toggles or slot fillings; it may be one that is refused."""
    main = main or chance.choice([one for one in facts if one["kind"] in ("decoder", "preset")])
    fitting = [one for one in facts if one["kind"] in (*TOGGLES, *(slot["kind"] for slot in main["slots"]))]
    extras = chance.sample(fitting, chance.choice((0, 0, 1, 1, 2)))
    return {
        "strategy": main["name"],
        "knobs": random_knobs(main, chance),
        "extras": [[one["name"], random_knobs(one, chance)] for one in extras],
        "forced": [],
    }


def random_knobs(one: Facts, chance: random.Random) -> dict[str, Any]:
    """Values for about a third of the knobs, within their limits; texts keep their defaults."""
    return {knob["name"]: _value(knob, chance) for knob in one["knobs"] if _is_bounded(knob) and chance.random() < 0.3}


def _is_bounded(knob: dict[str, Any]) -> bool:
    return (
        bool(knob["choices"])
        or knob["type"] == "bool"
        or (knob["type"] in ("int", "float") and None not in (knob["min"], knob["max"]))
    )


def _value(knob: dict[str, Any], chance: random.Random) -> Any:
    if knob["choices"]:
        return chance.choice(knob["choices"])
    if knob["type"] == "bool":
        return chance.random() < 0.5
    if knob["type"] == "int":
        return chance.randint(int(knob["min"]), int(knob["max"]))
    return round(chance.uniform(knob["min"], knob["max"]), 4)
