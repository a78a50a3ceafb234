"""All valid lanes, generated from the declarations of the strategies, so that no test needs a list."""
from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from playground.contract import Strategy, discover, find, make
from playground.contract.lane_config import LaneConfig, assemble
from playground.errors import Refusal

TOGGLES = ("sampler", "constraint", "cache_policy", "compute_policy", "overlay")
TEXT = ("decoder", "preset")  # kinds that generate from left to right; canvas decoders have their own tests
Added = tuple[str, dict[str, Any]]


def registered(*kinds: str, promising: str = "") -> list[type[Strategy]]:
    """Strategies of the project of these kinds, or of all, that give a guarantee, or any."""
    return [cls for cls in discover().values() if cls.__module__.startswith("strategies.")
            and (not kinds or cls.kind in kinds) and (not promising or promising in cls.guarantee)]


@cache
def brief(name: str) -> dict[str, Any]:
    """Knobs that keep each of the many thousand runs over which a law is summed short: `BRIEF` in the strategy's own
    test file. Parsed instead of imported, because test files import this module.
    """
    file = Path(__file__).with_name(f"test_strategies_{name}.py")
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
    values = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BRIEF"]
    return ast.literal_eval(values[0])[name] if values else {}


def corners(cls: type[Strategy], most: float = 2) -> list[dict[str, Any]]:
    """Settings to test: the defaults, then one knob at a time at its lowest, highest (up to `most`) and each choice."""
    found: list[dict[str, Any]] = [{}]
    for knob in cls.knobs():
        ends = [knob.min, min(knob.max, most)] if knob.min is not None and knob.max is not None else []
        found += [{knob.name: value} for value in dict.fromkeys([*ends, *knob.choices]) if value != knob.default]
    return [{**brief(cls.name), **knobs} for knobs in found if _agree(cls, knobs)]


def shared_out(classes: Iterable[type[Strategy]], most: float = 2, parts: int = 3) -> list:
    """Test parameters: every corner of these strategies with a share of all lanes, a third of it in each case. The
    corners of one strategy together cover every lane."""
    found = [
        (cls, turn, knobs, min(parts, len(corners(cls, most))))
        for cls in classes
        for turn, knobs in enumerate(corners(cls, most))
    ]
    return [
        pytest.param((cls.name, knobs), slice(turn % of + of * third, None, of * 3), id=f"{cls.name}-{knobs}-{third}")
        for cls, turn, knobs, of in found
        for third in range(3)
    ]


def share(configs: list[LaneConfig], part: slice) -> list[LaneConfig]:
    """A part of these lanes; all, if they are too few for each part to have one."""
    return configs[part] or configs


def _agree(cls: type[Strategy], knobs: dict[str, Any]) -> bool:
    """Whether a knob value is valid with the defaults of the others and needs no model-specific training."""
    try:
        return not make(cls.name, **{**brief(cls.name), **knobs}).trained
    except Refusal:
        return False


def fillings(cls: type[Strategy], cornered: bool = False) -> Iterator[list[Added]]:
    """The ways to fill a decoder's slots; with `cornered` every corner of every filling, one at a time."""
    choices = [registered(kind) for kind in cls.slots().values()]
    for chosen in product(*choices):
        yield [(part.name, brief(part.name)) for part in chosen]
        for i, part in enumerate(chosen if cornered else ()):
            for knobs in corners(part)[1:]:
                yield [(other.name, knobs if j == i else brief(other.name)) for j, other in enumerate(chosen)]


def lanes(promising: str = "", cornered: bool = False, added: tuple[Added, ...] = ()) -> list[LaneConfig]:
    """Every decoder with every filling of its slots and these toggles, if it is valid and gives the guarantee."""
    wanted = [LaneConfig(cls.name, {}, [*filling, *added]) for cls in registered(*TEXT, promising=promising)
              for filling in fillings(cls, cornered)]
    return [config for config in wanted if can_be_had(config) and (not promising or _promises(config, promising))]


def can_be_had(config: LaneConfig) -> bool:
    try:
        assemble(config)
    except Refusal:
        return False
    return True


def _promises(config: LaneConfig, guarantee: str) -> bool:
    verifiers = [find(name) for name, _ in config.extras if find(name).kind == "verifier"]
    return guarantee in assemble(config).guarantee() and all(guarantee in verifier.guarantee for verifier in verifiers)


def title(config: LaneConfig) -> str:
    """A config in a few letters: "speculative+draft_model(width=2)+rejection"."""
    return "+".join(_named(name, knobs) for name, knobs in [(config.strategy, config.knobs), *config.extras])


def _named(name: str, knobs: dict[str, Any]) -> str:
    inside = ",".join(f"{key}={str(value)[:12]}" for key, value in knobs.items())
    return f"{name}({inside})" if inside else name


# --- guarantees that need an example each, in the test file of the strategy ---

@dataclass(frozen=True)
class Collapse:
    """Settings at which a lane must generate exactly the tokens of a simpler lane."""

    lane: LaneConfig
    baseline: LaneConfig
    on: str = "target"  # model the baseline runs on
    twins: bool = False  # both models have the same weights


def unchanged_by(name: str, **knobs: Any) -> list[Collapse]:
    """Every lane that supports a toggle, with settings at which the toggle changes nothing."""
    added = [(replace(plain, extras=[*plain.extras, (name, knobs)]), plain) for plain in lanes()]
    return [Collapse(lane, plain) for lane, plain in added if can_be_had(lane)]


def declared(name: str) -> dict[str, list]:
    """The value of this name in all files tests/test_strategies_*.py, by strategy."""
    files = sorted(Path(__file__).parent.glob("test_strategies_*.py"))
    return {
        key: examples
        for file in files
        for key, examples in getattr(importlib.import_module(file.stem), name, {}).items()
    }
