"""Load models for the page in the background, once for all visitors, with progress for those who wait."""
from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from playground.errors import Refusal

KEEP = 2  # sets of models kept in memory
WEIGHTS = 8  # sets of the newest model, in different weights
PENDING = 3  # sets being loaded or waiting for it
POLL = 0.2  # seconds between two reports of progress
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelRequest:
    """Which models to load, and how; empty names mean the bundled models."""

    model: str = ""
    draft: str = ""
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    draft_device: str = ""  # empty: the target's


@dataclass
class ModelLoad:
    """One set of models, loaded or being loaded."""

    fraction: float = 0.0
    text: str = "waiting"
    models: Any = None
    refusal: Refusal | None = None
    bytes: int = 0  # of the weights, if ModelLoader.check counts them
    ended: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False
    watchers: int = 0  # visitors who wait for it

    def report(self, fraction: float, text: str) -> None:
        """Take down how far it is; raises Refusal, which ends it, once it is cancelled."""
        if self.cancelled:
            raise Refusal("Loading was cancelled. Files that had arrived whole are kept.", "model")
        self.fraction, self.text = fraction, text

    def watch(self) -> Iterator[ModelLoad]:
        """Yield itself every POLL seconds while it loads."""
        self.watchers += 1
        try:
            while not self.ended.wait(POLL):
                yield self
        finally:
            self.watchers -= 1

    def result(self) -> Any:
        """Wait for the models; raises Refusal if they could not be loaded."""
        self.ended.wait()
        if self.refusal:
            raise Refusal(str(self.refusal), self.refusal.about or "model")
        return self.models


class ModelLoader:
    """Keeps the most recently used sets of models and loads one set at a time.

    The set `pinned` is never dropped. `check` is called before a set is loaded, with the request and the bytes of all
    loaded sets; it returns the bytes the set needs, or raises Refusal.
    """

    def __init__(
        self,
        load: Callable[..., Any],
        pinned: ModelRequest | None = None,
        check: Callable[[ModelRequest, int], int] = lambda request, held: 0,
    ):
        self._load, self._pinned, self._check = load, pinned, check
        self._sets: OrderedDict[ModelRequest, ModelLoad] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    def request(self, request: ModelRequest) -> ModelLoad:
        """The requested set, loaded or being loaded; a set that failed is tried again.

        Raises Refusal if too many sets are being loaded.
        """
        with self._lock:
            loading = self._sets.get(request)
            if loading is None or loading.refusal or (loading.cancelled and loading.models is None):
                self._check_pending(request)
                loading = self._sets[request] = ModelLoad()
                threading.Thread(target=self._fill, args=(request, loading), name="loading", daemon=True).start()
            self._sets.move_to_end(request)
            self._drop()
            return loading

    def cancel(self, request: ModelRequest) -> None:
        """Stop loading a set at its next report, unless others wait for it as well, or it is the page's own."""
        with self._lock:
            loading = self._sets.get(request)
            if loading and not loading.ended.is_set() and loading.watchers <= 1 and request != self._pinned:
                loading.cancelled = True

    def loaded_target(self, request: ModelRequest) -> Any:
        """The requested target, with whatever draft it was loaded; None if it is not loaded, and nothing is loaded."""
        with self._lock:
            sets = [(replace(other, draft=request.draft), loading.models) for other, loading in self._sets.items()]
        return next((models.target for other, models in sets if models is not None and other == request), None)

    def inherited(self, request: ModelRequest) -> Any:
        """The requested models in a forked process, which inherits loaded sets; another is loaded here.

        Does not wait for locks and events of the parent, whose threads do not run here. Raises Refusal.
        """
        loading = self._sets.get(request)
        if loading is None or loading.models is None:
            self._lock, self._turn = threading.Lock(), threading.Lock()
            loading = self._sets[request] = ModelLoad()
            self._fill(request, loading)
        return loading.result()

    def _drop(self) -> None:
        """Drop the least recently used sets of other models than the newest; a run that still uses one keeps it alive.

        The newest model may be wanted in several weights at once, by lanes beside each other.
        """
        loaded = [request for request, loading in self._sets.items() if loading.ended.is_set()]
        newest = next(reversed(self._sets))
        idle = [request for request in loaded if request != self._pinned and request.model != newest.model]
        for request in idle[:max(0, len(self._sets) - KEEP)]:
            del self._sets[request]
        same = [request for request in loaded if request != self._pinned and request.model == newest.model]
        for request in same[:-WEIGHTS]:
            del self._sets[request]

    def _check_pending(self, request: ModelRequest) -> None:
        pending = sum(not loading.ended.is_set() for loading in self._sets.values())
        if pending >= PENDING and request != self._pinned:
            raise Refusal(
                f"{pending} other sets of models are being loaded: choose a loaded one, or try again in a minute.",
                "model",
            )

    def names(self) -> list[str]:
        """Names of the targets that are loaded."""
        with self._lock:
            return [str(loading.models.target.name) for loading in self._sets.values() if loading.models is not None]

    def held(self, but: ModelLoad | None = None) -> int:
        """Bytes of the weights of all loaded sets, or of all but one, where `check` counts them."""
        with self._lock:
            return sum(loading.bytes for loading in self._sets.values() if loading is not but)

    def _fill(self, request: ModelRequest, loading: ModelLoad) -> None:
        with self._turn:
            try:
                loading.report(0.0, "waiting")
                loading.bytes = self._check(request, self.held(loading))
                loading.models = self._load(
                    request.model or None,
                    request.draft or None,
                    device=request.device,
                    dtype=request.dtype,
                    quantization=request.quantization,
                    progress=loading.report,
                    draft_device=request.draft_device,
                )
            except Refusal as refusal:
                loading.refusal, loading.bytes = refusal, 0
            except Exception:
                log.exception("loading %s failed", request)
                loading.refusal = Refusal(
                    f"Loading {request.model or 'the bundled models'} failed with an internal error; see the log.",
                    "model",
                )
            loading.ended.set()
