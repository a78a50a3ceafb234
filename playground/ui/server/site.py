"""The state of the page's process: its models, its runs, its admission queue, and the rules for visitors."""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import playground
from playground.asset_files import ASSETS
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.player.frames import recording
from playground.request_limits import Rules, is_public
from playground.trace import Trace
from playground.ui.classroom.classroom import Classroom
from playground.ui.components.settings import Settings
from playground.ui.guard.loop_time import Handover, LoopTime
from playground.ui.guard.readers import current_request
from playground.ui.models.chosen_models import ChosenModels
from playground.ui.models.fits import MemoryGuard
from playground.ui.models.model_offers import ModelOffers
from playground.ui.server.admission_queue import STOPPING, AdmissionQueue, QueueLimits, Ticket, Visitor
from playground.ui.server.gpu_work import GpuWork, prepare_run, score_prompt
from playground.ui.server.model_loader import ModelLoad, ModelLoader, ModelRequest
from playground.ui.server.page_runs import PageRuns
from playground.ui.server.run_streams import RunStreams
from playground.ui.server.worker import Run
from playground.ui.server.zero_gpu import RemoteRun, load_on_host, on_zero


def _load(*names: Any, **how: Any) -> Any:
    from playground.decoding.session import leave_a_core  # imports torch
    leave_a_core()
    if on_zero():
        return load_on_host(*names, **how)
    return playground.load(*names, **how)


@dataclass
class Site:
    """What all pages and visitors share. `load`, `prepare` and `score` lead to the engine; tests replace them."""

    model_request: ModelRequest = field(default_factory=ModelRequest)
    rules: Rules = field(default_factory=Rules)
    load: Callable[..., Any] = _load
    prepare: Callable[[Any, Settings, Memory], Any] = prepare_run
    score: Callable[[Any, Settings], Any] = score_prompt
    classroom: Classroom | None = None  # the class that follows the runs of this page
    proposes: str = "auto"  # which real model the page proposes: a name of its list, "none", or the best that fits

    def __post_init__(self) -> None:
        self.model_loader = ModelLoader(self._load_and_measure, self.model_request, self._check_memory)
        self.chosen = ChosenModels(self.model_request, self.rules, self.model_loader)
        self.offers = ModelOffers(self)
        self.runs = PageRuns(GpuWork(self.chosen, self.prepare, self.score), self.rules)
        self.admission = AdmissionQueue(QueueLimits.for_visitors() if self.rules.public else QueueLimits())
        self.streams = RunStreams()
        self.proxies, self.loop_time = trusted_proxies(), LoopTime(noted=Handover().note)
        self.stopping = False

    @classmethod
    def from_environment(cls, model_request: ModelRequest) -> Site:
        """A site configured by the environment.

        The page is public on a Space or with PLAYGROUND_PUBLIC=1; PLAYGROUND_RUN_PROGRAMS=1 then lets it run programs
        written by models. PLAYGROUND_PROPOSES names the real model that it proposes; a public page without it proposes
        none.
        """
        programs = os.environ.get("PLAYGROUND_RUN_PROGRAMS") == "1"
        proposes = os.environ.get("PLAYGROUND_PROPOSES") or ("none" if is_public() else "auto")
        return cls(model_request, Rules.for_visitors(programs) if is_public() else Rules(), proposes=proposes)

    def check(self) -> None:
        """Raise Refusal for invalid options, before the page is served; models on the hub are looked up later."""
        self.offers.check()
        if self.model_request == ModelRequest():
            return
        from playground.engine.checkpoint.hub_files import find_source, is_folder
        from playground.engine.loading.load import Loading  # imports torch, which takes seconds
        from playground.weight_changes import WeightChanges
        for device in (self.model_request.device, self.model_request.draft_device or self.model_request.device):
            changes = WeightChanges.of_model(self.model_request.quantization)
            Loading(device, self.model_request.dtype, changes.quantization).resolve()
        for name in (self.model_request.model, self.model_request.draft):
            if name and is_folder(name):
                find_source(name)

    def warm(self, wait: bool = False) -> ModelLoad:
        """Start loading the page's own models."""
        loading = self.model_loader.request(self.model_request)
        if wait:
            loading.ended.wait()
        return loading

    def _load_and_measure(self, *names: Any, **how: Any) -> Any:
        """Load models and measure how fast the target decodes, unless runs would slow it down."""
        models = self._changed(*names, **how) or self.load(*names, **how)
        if not on_zero() and not any(self.runs):
            self.offers.speeds.measure(models.target)
        return models

    def _changed(self, model: str | None, draft: str | None, *, quantization: str, progress: Any, **how: Any) -> Any:
        """A target whose layers are changed, on the tensors of the one that is loaded; None for other models, and if
        that is not loaded.
        """
        from playground.decoding.models import Models  # imports torch
        from playground.weight_changes import WeightChanges
        changes = WeightChanges.of_model(quantization)
        if not changes.layers or draft != playground.NO_DRAFT or on_zero():
            return None
        unchanged = ModelRequest(model or "", draft, quantization=changes.loaded or "none", **how)
        base = self.model_loader.loaded_target(unchanged)
        return base and Models(playground.in_weights(base, quantization, progress))

    def _check_memory(self, model_request: ModelRequest, held: int) -> int:
        """On a public page, refuse models that do not fit into memory. The page's own models are checked on loading."""
        is_visitors = self.rules.public and model_request != self.model_request
        placed = replace(model_request, device="cpu") if on_zero() else model_request
        return MemoryGuard().check(placed, held) if is_visitors else 0

    def join(self, kind: str) -> Ticket:
        """Queue the sender of the current request for a seat; raises Refusal if the page is busy."""
        return self.admission.join(kind, self.visitor())

    def visitor(self) -> Visitor:
        """The sender of the current request."""
        return Visitor.of(current_request(), self.proxies)

    def show_to_class(self, run: Run | RemoteRun) -> None:
        """Let the class follow a run of the page, if there is a class."""
        if self.classroom:
            self.classroom.show(run)

    def drain(self, sentence: str = STOPPING) -> None:
        """End every run with a message and refuse new ones."""
        self.stopping = True
        self.admission.close(sentence)
        for run in self.runs:
            run.fail(sentence)


def trusted_proxies() -> int:
    """The number of proxies that append to X-Forwarded-For: PLAYGROUND_PROXIES, by default 1 on a Space, else 0."""
    given = os.environ.get("PLAYGROUND_PROXIES", "")
    return int(given) if given.isdecimal() else int("SPACE_ID" in os.environ)


FIRST_SETTINGS = {
    "prompt": "Tell me a story about Mia.",
    "mode": "chat",
    "seed": 3,
    "length": 160,
    "lanes": [
        {"strategy": "greedy"},
        {"strategy": "speculative", "extras": [["draft_model", {"depth": 5}], ["greedy_match", {}]]},
    ],
}
"""The settings of the recorded trace, which tools/record_first_view.py makes: a new visitor can run what is shown."""


def first_view() -> dict[str, Any] | None:
    """The recorded trace that plays until a model is loaded, as one frame; None if it cannot be read."""
    try:
        trace = Trace.load(ASSETS / "traces" / "first_view.jsonl")
    except Refusal:
        return None
    return recording([asdict(header) for header in trace.headers], [stamped.to_json() for stamped in trace.events])
