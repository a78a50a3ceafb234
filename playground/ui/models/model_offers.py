"""Which models fit this machine: their sizes, what they take of its memory, how fast they will decode, and one that the
page proposes in place of its toy.

Nothing here is a guess: memory is measured, sizes come from files or from the hub, and a speed is either measured or
derived from the measured memory bandwidth, and says which.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

from playground.engine.checkpoint.catalogue import BUNDLED, OTHER_TOKENS, SUGGESTED, TABLES, Entry, entries, partner
from playground.errors import Refusal
from playground.request_limits import quoted
from playground.ui.models.fits import memory_of, room_for_visitors
from playground.ui.server.model_loader import ModelRequest

if TYPE_CHECKING:
    from playground.decoding.decode_speed import DecodeSpeeds
    from playground.engine.loading.load import Loading
    from playground.engine.loading.model_sizes import HubModel, ModelSize

AUTO, NONE = "auto", "none"  # what a page proposes, if not a certain model
PAUSE = 60.0  # seconds until the hub is asked again about models that it has not described
AT_ONCE = 4  # requests to the hub
READABLE = 8.0  # tokens a second that a proposed model has to reach: about as fast as people read
SMALLEST = 1 << 28  # bytes of weights; smaller ones may stay in the caches of a processor, which no bandwidth bounds
UNREACHABLE = "The hub cannot be reached ({}): only models that are on this machine can be loaded."
log = logging.getLogger(__name__)
DRAFTS = {entry.draft for entry in BUNDLED} | {OTHER_TOKENS}


@dataclass(frozen=True)
class Room:
    """Bytes of a device: free for new weights, and in all."""

    device: str
    free: int
    total: int


@dataclass(frozen=True)
class ModelOffer:
    """A model of the list. `size`: its own and its draft's; None if it is not known, and then `why` says why not.

    `speed` in tokens a second; `measured`: on this machine, otherwise derived. `needed`: bytes of memory.
    """

    entry: Entry
    draft: str = ""
    size: ModelSize | None = None
    here: bool = False
    needed: int = 0
    fits: bool = False
    speed: float | None = None
    measured: bool = False
    why: str = ""


class ModelOffers:
    """The offers of one site. What the hub said is kept for as long as the process lives."""

    def __init__(self, site: Any, now: Callable[[], float] = monotonic):
        self._site, self._now = site, now
        self._hub: dict[str, HubModel] = {}
        self._unreachable, self._asked = "", -PAUSE
        self._lock = Lock()
        self.proposed: ModelOffer | None = None
        self._proposed_at = -PAUSE

    @cached_property
    def speeds(self) -> DecodeSpeeds:
        """What is known of the speed of models on this machine."""
        from playground.decoding.decode_speed import DecodeSpeeds  # imports torch
        return DecodeSpeeds()

    def check(self) -> None:
        """Raise Refusal if the owner proposes a model that is not in the list."""
        if self._site.proposes not in (AUTO, NONE, *(entry.name for entry in entries())):
            raise Refusal(f"PLAYGROUND_PROPOSES is {quoted(self._site.proposes)}, which is no model of the page's list:"
                          " name one of it, or none.", "model")

    def room(self, request: ModelRequest) -> Room:
        """The memory of the device that models would be loaded on, measured now."""
        how = _loading(request)
        memory = memory_of(how.device, how.may_spread) if how.may_spread else memory_of(how.device)
        free = room_for_visitors(memory, self._site.model_loader.held()) if self._site.rules.public else memory.free
        return Room(how.device, free, memory.total)

    def listed(self, request: ModelRequest) -> list[ModelOffer]:
        """Every model of the list, as far as it is known without a network."""
        room = self.room(request)
        return [self._offer(entry, request, room) for entry in _targets()]

    def ask_hub(self) -> str:
        """Look up the sizes of the models that are not on this machine, at most once in PAUSE seconds; returns why the
        hub cannot be reached, or an empty text.
        """
        with self._lock:
            if self._now() - self._asked < PAUSE:
                return self._unreachable
            wanted = [name for name in _hub_names() if name not in self._hub and not _is_here(name)]
            self._unreachable, self._asked = "", self._now()
            for name in wanted[:1]:  # alone, so that an unreachable hub is asked once
                self._look_up(name)
            if not self._unreachable:
                with ThreadPoolExecutor(AT_ONCE) as threads:
                    list(threads.map(self._look_up, wanted[1:]))
            return self._unreachable

    def propose(self, request: ModelRequest) -> ModelOffer | None:
        """The model that the page proposes in place of its own; None if it has a real one, or none is to be proposed,
        fits, or can be fetched.
        """
        site = self._site
        if site.proposes == NONE or site.model_request.model not in ("", BUNDLED[0].name):
            return None
        if self._now() - self._proposed_at < PAUSE:
            return self.proposed
        self._proposed_at = self._now()
        self.ask_hub()
        listed = [offer for offer in self.listed(request) if offer.needed and offer.fits]
        if site.proposes != AUTO:
            self.proposed = next((offer for offer in listed if offer.entry.name == site.proposes), None)
        else:
            self.proposed = best([offer for offer in listed if offer.entry in SUGGESTED])
        return self.proposed

    def _look_up(self, name: str) -> None:
        """Ask the hub about a model. If it refuses, the model's row says that its size is not known."""
        from playground.engine.checkpoint.hub_files import Unreachable  # imports torch
        from playground.engine.loading.model_sizes import hub_model
        try:
            self._hub[name] = hub_model(name)
        except Unreachable as refusal:
            self._unreachable = UNREACHABLE.format(refusal.cause)
        except Refusal as refusal:
            log.info("%s cannot be looked up: %s", name, refusal)

    def _offer(self, entry: Entry, request: ModelRequest, room: Room) -> ModelOffer:
        how, draft = _loading(request), partner(entry.name)
        try:
            own, beside = self._size(entry.name, how), self._size(draft, how) if draft else None
        except Refusal as refusal:
            return ModelOffer(entry, draft, why=str(refusal))
        if own is None or (draft and beside is None):
            return ModelOffer(entry, draft)
        size = _together(own, beside) if beside else own
        from playground.engine.loading.load import HEADROOM  # imports torch
        needed = round(size.loaded * HEADROOM)
        offer = ModelOffer(entry, draft, size, not size.missing, needed, needed <= room.free)
        return self._with_speed(offer, own.loaded, how)

    def _with_speed(self, offer: ModelOffer, weights: int, how: Loading) -> ModelOffer:
        name = offer.entry.name
        if measured := self.speeds.find(name, how.device, how.dtype, how.quantization):
            return replace(offer, speed=measured, measured=True)
        if weights < SMALLEST or offer.entry.fills:
            return offer
        from playground.engine.memory_bandwidth import memory_bandwidth  # imports torch
        return replace(offer, speed=memory_bandwidth(how.device) / weights)

    def _size(self, name: str, how: Loading) -> ModelSize | None:
        """The size of a model on this machine, or what the hub said; None if neither is known. Raises Refusal."""
        from playground.engine.loading.model_sizes import local_size  # imports torch
        known = self._hub.get(name)
        return local_size(name, how) or (known.size(how) if known else None)


def best(offers: list[ModelOffer]) -> ModelOffer | None:
    """Of models that fit, the largest one that is fast enough to read along, or the fastest; one that is on this
    machine goes before all that would be downloaded.
    """
    there = [offer for offer in offers if offer.here] or offers
    quick = [offer for offer in there if (offer.speed or 0) >= READABLE]
    if quick:
        return max(quick, key=lambda offer: offer.size.parameters)
    return max(there, key=lambda offer: offer.speed or 0, default=None)


def _targets() -> Iterator[Entry]:
    return (entry for entry in entries() if entry.name not in DRAFTS and entry.name not in TABLES)


def _hub_names() -> list[str]:
    """The models of the list that come from the hub, drafts included; each once."""
    return list(dict.fromkeys(name for entry in SUGGESTED for name in (entry.name, entry.draft) if name))


def _is_here(name: str) -> bool:
    from playground.engine.checkpoint.hub_files import on_machine  # imports torch
    return on_machine(name) is not None


def _together(own: ModelSize, draft: ModelSize) -> ModelSize:
    from playground.engine.loading.model_sizes import ModelSize  # imports torch
    loaded = own.loaded + draft.loaded if own.loaded and draft.loaded else 0
    return ModelSize(own.parameters, loaded, own.stored + draft.stored, own.missing + draft.missing)


def _loading(request: ModelRequest) -> Loading:
    """How models are loaded on this machine; raises Refusal for a device that is not there."""
    from playground.engine.loading.load import Loading  # imports torch
    from playground.weight_changes import WeightChanges
    quantization = WeightChanges.of_model(request.quantization).quantization
    return Loading(request.device, request.dtype, quantization).resolve()
