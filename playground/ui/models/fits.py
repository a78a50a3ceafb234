"""Check, before loading, whether the models that a visitor requests fit into the free memory."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from playground.errors import Refusal

RESERVED = 0.25  # of a device's memory: for the caches and activations of runs


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device, in total and free."""

    total: int
    free: int


@dataclass(frozen=True)
class Needed:
    """Bytes that a set of models needs, and on which device."""

    bytes: int
    device: str
    may_spread: bool = False  # over all GPUs


def needed_by(request) -> Needed:
    """Bytes of the requested weights, including headroom; raises Refusal if the models cannot be found."""
    from playground.engine.checkpoint import catalogue
    from playground.engine.loading.load import HEADROOM, Loading, estimate  # imports torch
    from playground.training.public_heads import names_head
    from playground.weight_changes import WeightChanges
    changes = WeightChanges.of_model(request.quantization)
    how = Loading(request.device, request.dtype, changes.quantization).resolve()
    name = changes.named(request.model or catalogue.BUNDLED[0].name)
    if name in catalogue.TABLES:
        return Needed(0, "cpu")
    draft = request.draft or catalogue.partner(name)
    parts = [(name, how)]
    if draft in catalogue.PACKED:
        parts.append((name, Loading(how.device, how.dtype, draft, how.may_spread)))
    elif draft and draft != "none" and not names_head(draft):  # a head is small beside its target
        parts.append((draft, how))
    needed = round(sum(estimate(part, loading).bytes for part, loading in parts) * HEADROOM)
    return Needed(needed, how.device, how.may_spread)


def memory_of(device: str, may_spread: bool = False) -> DeviceMemory:
    """The memory of a device, or of all GPUs."""
    from playground.engine.loading.load import device_memory  # imports torch
    return DeviceMemory(*device_memory(device, may_spread))


def room_for_visitors(memory: DeviceMemory, held: int) -> int:
    """Bytes that new weights may take on a public page, so that RESERVED of the memory is left for runs.

    held: bytes of the weights of all loaded sets, since mapped files do not show as used memory.
    """
    return max(0, round(min(memory.free, memory.total - held) - RESERVED * memory.total))


class MemoryGuard:
    """Refuses models that do not fit. Loaded weights count too (`held`): mapped files do not show as used memory."""

    def __init__(self, needed: Callable[..., Needed] = needed_by, memory: Callable[..., DeviceMemory] = memory_of):
        self._needed, self._memory = needed, memory

    def check(self, request, held: int) -> int:
        """Bytes the requested models need; raises Refusal if less than RESERVED of the memory would be left for runs.

        held: bytes of the weights of all loaded sets.
        """
        from playground.engine.loading.load import size_text
        needed = self._needed(request)
        memory = self._memory(needed.device, needed.may_spread) if needed.may_spread else self._memory(needed.device)
        room = room_for_visitors(memory, held)
        if needed.bytes > room:
            name = request.model or "The bundled model"
            raise Refusal(
                f"{name} with its draft takes about {size_text(needed.bytes)}, but only {size_text(room)} are free on "
                "this page: choose a smaller model, or try again later.",
                "model",
            )
        return needed.bytes
