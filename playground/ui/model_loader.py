"""Models for the page: loaded in the background, once for all visitors, with progress anyone may watch."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from playground.errors import Refusal

KEEP = 2  # sets of models held at once
PENDING = 3  # sets that are loaded or wait for it; more would keep one who comes later waiting for long
GLANCE = 0.2  # seconds between two looks at the progress
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelRequest:
    """Which models, and how; empty names mean the bundled pair."""

    model: str = ""
    draft: str = ""
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    draft_device: str = ""  # beside the target


@dataclass
class ModelLoad:
    """One set of models on its way or here."""

    fraction: float = 0.0
    text: str = "waiting"
    models: Any = None
    refusal: Refusal | None = None
    bytes: int = 0  # of the weights, where somebody counts them
    ended: threading.Event = field(default_factory=threading.Event)

    def tell(self, fraction: float, text: str) -> None:
        self.fraction, self.text = fraction, text

    def watch(self) -> Iterator[ModelLoad]:
        """Itself, now and then while it loads."""
        while not self.ended.wait(GLANCE):
            yield self

    def result(self) -> Any:
        """The models; raises Refusal where they could not be had."""
        self.ended.wait()
        if self.refusal:
            raise Refusal(str(self.refusal), self.refusal.about or "model")
        return self.models


class ModelLoader:
    """Holds the last few sets of models and loads one set at a time.

    The set `pinned` is never dropped for another. `check` is asked before a set is loaded, with the wish and the bytes
    of all sets held; it returns the bytes the set takes, or raises Refusal.
    """

    def __init__(
        self,
        load: Callable[..., Any],
        pinned: ModelRequest | None = None,
        check: Callable[[ModelRequest, int], int] = lambda wish, held: 0,
    ):
        self._load, self._pinned, self._check = load, pinned, check
        self._sets: OrderedDict[ModelRequest, ModelLoad] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    def want(self, wish: ModelRequest) -> ModelLoad:
        """The set under way or here; a set that failed is tried afresh. Raises Refusal where too many are under way
        already.
        """
        with self._lock:
            arrival = self._sets.get(wish)
            if arrival is None or arrival.refusal:
                self._check_pending(wish)
                arrival = self._sets[wish] = ModelLoad()
                threading.Thread(target=self._fill, args=(wish, arrival), name="loading", daemon=True).start()
            self._sets.move_to_end(wish)
            self._drop()
            return arrival

    def _drop(self) -> None:
        """Forget the sets not wanted for longest; a run that still uses one keeps it alive."""
        idle = [wish for wish, arrival in self._sets.items() if arrival.ended.is_set() and wish != self._pinned]
        for wish in idle[:max(0, len(self._sets) - KEEP)]:
            del self._sets[wish]

    def _check_pending(self, wish: ModelRequest) -> None:
        pending = sum(not arrival.ended.is_set() for arrival in self._sets.values())
        if pending >= PENDING and wish != self._pinned:
            raise Refusal(
                f"{pending} other sets of models are being loaded: choose one that is loaded, or try again in a minute.",
                "model",
            )

    def names(self) -> list[str]:
        """Names of the targets that are loaded."""
        with self._lock:
            return [str(arrival.models.target.name) for arrival in self._sets.values() if arrival.models is not None]

    def _held(self, mine: ModelLoad) -> int:
        with self._lock:
            return sum(arrival.bytes for arrival in self._sets.values() if arrival is not mine)

    def _fill(self, wish: ModelRequest, arrival: ModelLoad) -> None:
        with self._turn:
            try:
                arrival.bytes = self._check(wish, self._held(arrival))
                arrival.models = self._load(
                    wish.model or None,
                    wish.draft or None,
                    device=wish.device,
                    dtype=wish.dtype,
                    quantization=wish.quantization,
                    progress=arrival.tell,
                    draft_device=wish.draft_device,
                )
            except Refusal as refusal:
                arrival.refusal, arrival.bytes = refusal, 0
            except Exception:
                log.exception("loading %s failed", wish)
                arrival.refusal = Refusal(
                    f"Loading {wish.model or 'the bundled models'} failed inside the program; the log says where.",
                    "model",
                )
            arrival.ended.set()
