"""The cache policies that there are, each with the knobs at which it is compared with the others."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from playground.contract import CachePolicy, Full, discover
from playground.contract.lane_config import LaneConfig

if TYPE_CHECKING:
    from playground.engine.model import Model

FULL = "full cache"


@dataclass(frozen=True)
class Point:
    """A policy with its knobs, under the name it has in tables; the full cache is no policy at all."""

    name: str
    policy: str = ""
    knobs: dict[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> LaneConfig:
        return LaneConfig("greedy", extras=[(self.policy, self.knobs)] if self.policy else [])


def policies() -> list[type[CachePolicy]]:
    return [cls for cls in discover().values() if issubclass(cls, CachePolicy)]


def alike(tokens: int, prompt: int) -> list[Point]:
    """The full cache, then every policy once: holding so many tokens of a prompt where it goes by tokens, as it is set
    by itself where not.
    """
    return [Point(FULL), *(Point(cls.name, cls.name, cls.holding(tokens, prompt) or {}) for cls in policies())]


def own_sizes(cls: type[CachePolicy]) -> list[Point]:
    """A policy that does not go by tokens: at each choice of its first knob where that is a menu, as it is set by
    itself where not.
    """
    first = next(iter(cls.knobs()), None)
    if first is None or not first.choices:
        return [Point(cls.name, cls.name)]
    return [Point(f"{cls.name}, {first.name} {choice}", cls.name, {first.name: choice}) for choice in first.choices]


def full_cache(model: Model, prompt: int, generated: int = 0) -> Full:
    config = model.network.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return Full(prompt, generated, model.depth, heads, head, 8 * model.dtype.itemsize)
