"""Whether a set of models that a visitor asks for fits into memory beside what is loaded and running, before anything
of it is loaded.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from playground.errors import Refusal

RESERVED = 0.25  # of a device's memory: for the caches and activations of runs


@dataclass(frozen=True)
class Memory:
    """Bytes of a device: all it has, and what is free now."""

    total: int
    free: int


@dataclass(frozen=True)
class Needed:
    """Bytes that a set of models takes, and on which device."""

    bytes: int
    device: str


def needed_by(wish) -> Needed:
    """What the weights of a wish take, headroom included; raises Refusal where the models cannot be found."""
    from playground.engine import catalogue  # not before a model is wanted: loading brings torch along
    from playground.engine.load import HEADROOM, Loading, estimate
    how = Loading(wish.device, wish.dtype, wish.quantization).resolve()
    name = wish.model or catalogue.BUNDLED[0].name
    if name == catalogue.ORACLE:
        return Needed(0, "cpu")
    draft = wish.draft or catalogue.partner(name)
    parts = [(name, how)]
    if draft in catalogue.PACKED:
        parts.append((name, Loading(how.device, how.dtype, draft)))
    elif draft and draft != "none":
        parts.append((draft, how))
    return Needed(round(sum(estimate(part, loading).bytes for part, loading in parts) * HEADROOM), how.device)


def memory_of(device: str) -> Memory:
    """What a device has."""
    from playground.engine.load import device_memory  # not before a model is wanted
    return Memory(*device_memory(device))


class MemoryGuard:
    """Refuses what does not fit. `held` of `check` counts the weights of sets that are kept: mapped files do not show
    as used memory.
    """

    def __init__(self, needed: Callable[..., Needed] = needed_by, memory: Callable[[str], Memory] = memory_of):
        self._needed, self._memory = needed, memory

    def check(self, wish, held: int) -> int:
        """Bytes that the wish takes; raises Refusal where a quarter of the memory would not be left for runs."""
        from playground.engine.load import size_text
        needed = self._needed(wish)
        memory = self._memory(needed.device)
        room = max(0, round(min(memory.free, memory.total - held) - RESERVED * memory.total))
        if needed.bytes > room:
            raise Refusal(
                f"{wish.model or 'The bundled model'} with its draft takes about {size_text(needed.bytes)}, and beside what is loaded and running "
                f"{size_text(room)} are free on this page: choose a smaller model, or try again later.",
                "model",
            )
        return needed.bytes
