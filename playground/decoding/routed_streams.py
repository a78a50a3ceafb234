"""Streams of the target under another choice of experts, as samplers declare them."""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from playground.errors import Refusal

if TYPE_CHECKING:
    from playground.contract import Sampler
    from playground.engine.model import Model


def read_routings(samplers: Iterable[Sampler], model: Model) -> dict[str, tuple[int, ...]]:
    """Ranks of the experts that run, by stream. Raises Refusal if the model has no such experts."""
    found: dict[str, tuple[int, ...]] = {}
    for sampler in samplers:
        routings = sampler.routings()
        if routings and not model.experts:
            raise Refusal(
                f"{sampler.title} chooses among experts, and {model.name} has no routers of the top-k kind: choose a "
                f"mixture of experts such as OLMoE or Mixtral, or remove {sampler.title}.",
                sampler.name,
            )
        if (most := max((rank for ranks in routings.values() for rank in ranks), default=0)) > model.experts:
            raise Refusal(
                f"{sampler.title} asks for the expert of rank {most}, and {model.name} has {model.experts} in a layer: "
                "choose a lower rank.",
                sampler.name,
            )
        found |= routings
    return found
