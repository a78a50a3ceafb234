"""The cache policies of the registry, each with the knobs with which it is compared."""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from playground.bench.speed.bandwidth_limit import kv_heads
from playground.contract import CachePolicy, Full, discover
from playground.errors import Refusal
from playground.lane_fields import LaneConfig

if TYPE_CHECKING:
    from playground.engine.model import Model

FULL = "full cache"


@dataclass(frozen=True)
class Point:
    """A policy with its knobs, under its name in tables. The full cache has no policy."""

    name: str
    policy: str = ""
    knobs: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> LaneConfig:
        return LaneConfig("greedy", extras=[(self.policy, self.knobs)] if self.policy else [])


def policies(only: Collection[str] = ()) -> list[type[CachePolicy]]:
    """All of them, or those with these names. Raises Refusal for another name."""
    found = {cls.name: cls for cls in discover().values() if issubclass(cls, CachePolicy)}
    if unknown := [name for name in only if name not in found]:
        raise Refusal(f"There is no cache policy {unknown[0]!r}; choose some of {', '.join(found)}.", "only")
    return [found[name] for name in only or found]


def points_at_budget(tokens: int, prompt: int, only: Collection[str] = ()) -> list[Point]:
    """The full cache, then every policy, or some by name, once: with a budget of `tokens` if it has a token budget,
    otherwise with its defaults.
    """
    knobs = {cls.name: cls.knobs_for_budget(tokens, prompt) or {} for cls in policies(only)}
    return [Point(FULL), *(Point(name, name, chosen) for name, chosen in knobs.items())]


def default_points(cls: type[CachePolicy]) -> list[Point]:
    """A policy without a token budget: at each choice of its first knob if it has choices, otherwise with its defaults.
    """
    first = next(iter(cls.knobs()), None)
    if first is None or not first.choices:
        return [Point(cls.name, cls.name)]
    return [Point(f"{cls.name}, {first.name} {choice}", cls.name, {first.name: choice}) for choice in first.choices]


def full_cache(model: Model, prompt: int, generated: int = 0) -> Full:
    """The size of a model's full cache after a prompt and generated tokens."""
    return Full(prompt, generated, model.depth, *kv_heads(model.network), 8 * model.dtype.itemsize)
