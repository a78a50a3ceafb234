"""The state of the page's process: its models, its workers, its admission queue, and the rules for visitors."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import playground
from playground.asset_files import ASSETS
from playground.contract.lane_config import attention_of
from playground.decoding.forked_session import ForkedSession, Siblings
from playground.decoding.lane_checks import Surroundings
from playground.decoding.visitor_memory import Memory
from playground.engine.checkpoint.catalogue import BUNDLED, PACKED, entries, listed_attention, partner
from playground.errors import Refusal
from playground.player.frames import recording
from playground.questions.questions import judging
from playground.remote.remote_server import RemoteServer
from playground.request_limits import Rules, is_public, quoted
from playground.run_request import DEFAULT, LANES, NO_DRAFT
from playground.trace import Trace
from playground.ui.benchmark.survey_run import SurveySettings, survey_session
from playground.ui.classroom.classroom import Classroom
from playground.ui.components.settings import Settings
from playground.ui.guard.readers import current_request
from playground.ui.models.model_offers import ModelOffers
from playground.ui.server.admission_queue import STOPPING, AdmissionQueue, QueueLimits, Ticket, Visitor
from playground.ui.server.fits import MemoryGuard
from playground.ui.server.memory_watch import MemoryWatch
from playground.ui.server.model_loader import ModelLoad, ModelLoader, ModelRequest
from playground.ui.server.run_streams import RunStreams
from playground.ui.server.worker import Health, Run, Worker
from playground.ui.server.zero_gpu import Batch, RemoteRun, batches, load_on_host, on_gpu, on_zero
from playground.weight_changes import adds_adapter


def _prepare(models: Any, settings: Settings, memory: Memory):
    from playground.decoding.limits import Limits
    from playground.decoding.prompt import Prompt
    from playground.decoding.session import prepare  # imports torch
    return prepare(models, settings.configs(), Prompt.of(settings), Limits.of(settings), memory=memory)


def _score(models: Any, settings: Settings):
    from playground.decoding.prompt import Prompt
    from playground.decoding.scoring import score
    return score(models, Prompt.of(settings))


def _load(*names: Any, **how: Any) -> Any:
    from playground.decoding.session import leave_a_core  # imports torch
    leave_a_core()
    if on_zero():
        return load_on_host(*names, **how)
    return playground.load(*names, **how)


@dataclass
class Site:
    """Access to the engine goes through `load`, `prepare` and `score`; tests replace them."""

    model_request: ModelRequest = field(default_factory=ModelRequest)
    rules: Rules = field(default_factory=Rules)
    load: Callable[..., Any] = _load
    prepare: Callable[[Any, Settings, Memory], Any] = _prepare
    score: Callable[[Any, Settings], Any] = _score
    classroom: Classroom | None = None  # the class that follows the runs of this page
    proposes: str = "auto"  # which real model the page proposes: a name of its list, "none", or the best that fits

    def __post_init__(self) -> None:
        self.model_loader = ModelLoader(self._load_and_measure, self.model_request, self._check_memory)
        self.offers = ModelOffers(self)
        self.admission = AdmissionQueue(QueueLimits.for_visitors() if self.rules.public else QueueLimits())
        self.streams = RunStreams()
        self.runs: WeakValueDictionary[str, Run | RemoteRun] = WeakValueDictionary()  # by name, while kept
        self.proxies = trusted_proxies()
        self._on_gpu = on_gpu(self._serve)
        self._workers: dict[str, Worker] = {}
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

    def warm(self, wait: bool = False) -> None:
        """Start loading the page's own models."""
        loading = self.model_loader.request(self.model_request)
        if wait:
            loading.ended.wait()

    def _load_and_measure(self, *names: Any, **how: Any) -> Any:
        """Load models and measure how fast the target decodes, unless runs would slow it down."""
        models = self.load(*names, **how)
        if not on_zero() and not any(worker.runs() for worker in list(self._workers.values())):
            self.offers.speeds.measure(models.target)
        return models

    def model_load(self, settings: Settings) -> ModelLoad:
        """The models that a visitor requested, loaded or being loaded; raises Refusal if they are not allowed."""
        return self.model_loader.request(self.model_request_for(settings))

    def weight_loads(self, settings: Settings) -> dict[str, ModelLoad]:
        """The targets with weights of their own that single lanes ask for, by these weights; raises Refusal."""
        self._check_weights(settings)
        request = replace(self.model_request_for(settings), draft=NO_DRAFT)
        return {name: self.model_loader.request(replace(request, quantization=name)) for name in settings.own_weights()}

    def _check_weights(self, settings: Settings) -> None:
        """Raise Refusal for adapters on a public page, which loads only what it lists."""
        if self.rules.public and any(map(adds_adapter, settings.own_weights())):
            raise Refusal(
                "This public page adds no adapters to its models: run the playground yourself, or choose other weights"
                " for the lane.",
                "weights",
            )

    def check_tools(self, settings: Settings) -> None:
        """Raise Refusal for tools that cannot be used. The model's chat template is asked only if it is loaded."""
        settings.check_tools(self.rules)
        target = self.model_loader.loaded_target(self.model_request_for(settings)) if settings.tools.strip() else None
        if target is not None:
            target.tokens.check_tools()

    def takes_tools(self, settings: Settings) -> bool:
        """Whether the chosen model's chat template describes tools; true if that is not known before it is loaded.
        Those of the bundled models do not.
        """
        if self.named(settings.model) in (entry.name for entry in BUNDLED):
            return False
        try:
            target = self.model_loader.loaded_target(self.model_request_for(settings))
            if target is not None:
                target.tokens.check_tools()
        except Refusal as refusal:
            return refusal.about != "tools"  # any other is about the models, and shown when they are loaded
        return True

    def has_draft(self, settings: Settings) -> bool:
        """Whether a draft model belongs to the chosen models, as far as is known before they are loaded."""
        try:
            chosen = self.model_request_for(settings)
        except Refusal:  # about the models, which is shown when they are loaded
            return True
        return (chosen.draft or partner(chosen.model or BUNDLED[0].name)) not in ("", NO_DRAFT)

    def attention(self, settings: Settings) -> str | None:
        """The attention of the chosen model if it fills masked positions; empty if it continues text, None if that is
        not known before it is loaded.
        """
        try:
            target = self.model_loader.loaded_target(self.model_request_for(settings))
        except Refusal:  # about the models, which is shown when they are loaded
            return None
        return attention_of(target) if target else listed_attention(self.named(settings.model))

    def surroundings(self, settings: Settings) -> Surroundings:
        """What lanes need besides their own settings, as far as it is known before the models are loaded."""
        return Surroundings(
            settings.context, self.has_draft(settings), self.named(settings.model), self.attention(settings)
        )

    def model_request_for(self, settings: Settings) -> ModelRequest:
        names = {"model": settings.model, "draft": settings.draft}
        for about, name in names.items():
            offered = (DEFAULT, NO_DRAFT, *(entry.name for entry in entries()), *(PACKED if about == "draft" else ()))
            if self.rules.public and name not in offered:
                raise Refusal(f"This public page offers only the models in its list, not {quoted(name)}.", about)
        chosen = self._named(settings.model.strip(), settings.draft.strip())
        return replace(
            chosen,
            dtype=settings.dtype if settings.dtype != "auto" else self.model_request.dtype,
            quantization=settings.quantization if settings.quantization != "none" else self.model_request.quantization,
        )

    def _named(self, model: str, draft: str) -> ModelRequest:
        """The default draft belongs to the default model; another model has its own."""
        own = model in (DEFAULT, "")
        return replace(self.model_request, model=self.model_request.model if own else model,
                       draft=draft if draft not in (DEFAULT, "") else self.model_request.draft if own else "")

    def start(
        self,
        loading: ModelLoad,
        settings: Settings,
        memory: Memory,
        siblings: Siblings | None = None,
        server: RemoteServer | None = None,
    ) -> Run | RemoteRun:
        """Start a run that reads and extends a visitor's memory; raises Refusal if the models cannot run it.

        With siblings, only the lane at their free place is run.
        server: generates one more lane; only for pages that are not public.
        """
        models = loading.result()
        if on_zero():
            run = RemoteRun(self._on_gpu("run", settings, siblings))
        else:
            session = self._session(models, settings, memory, siblings)
            if server and not siblings:  # in a fork, the server's lane is one of the siblings
                self._add_remote(session, server, settings)
            run = self.worker(models).take(session)
        self.runs[run.name] = run
        return run

    def _add_remote(self, session: Any, server: RemoteServer, settings: Settings) -> None:
        from playground.decoding.limits import Limits
        from playground.decoding.prompt import Prompt
        from playground.remote.remote_lane import add_lane  # imports torch
        if self.rules.public:
            raise Refusal("This public page does not connect to other servers: run the playground yourself.", "remote")
        if len(settings.lanes) >= LANES:
            raise Refusal(f"With the remote lane there are more than {LANES} lanes: remove one of the others.", "lanes")
        add_lane(session, server, Prompt.of(settings), Limits.of(settings))

    def _with_weights(self, models: Any, settings: Settings) -> Any:
        """Models that include those of lanes with weights of their own; raises Refusal if these cannot be loaded."""
        if not settings.own_weights():
            return models
        self._check_weights(settings)
        if on_zero():
            request = replace(self.model_request_for(settings), draft=NO_DRAFT)
            loaded = {name: self.model_loader.inherited(replace(request, quantization=name))
                      for name in settings.own_weights()}
        else:
            loaded = {name: loading.result() for name, loading in self.weight_loads(settings).items()}
        return replace(models, quantized={name: one.target for name, one in loaded.items()})

    def _session(self, models: Any, settings: Settings, memory: Memory, siblings: Siblings | None) -> Any:
        models = self._with_weights(models, settings)
        if siblings is None:
            return self._judged(models, settings, memory)
        alone = replace(settings, lanes=settings.lanes[siblings.place:siblings.place + 1])
        return ForkedSession(self._judged(models, alone, memory), siblings)

    def _serve(self, kind: str, *given: Any) -> Iterator[Any]:
        """Everything that needs the GPU, as one function: ZeroGPU keeps a process, with its models, for each."""
        serve = {
            "run": self._batches,
            "score": self._score_batches,
            "survey": self._survey_batches,
            "look": self._looks,
            "attribution": self._attributions,
        }
        yield from serve[kind](*given)

    def _batches(self, settings: Settings, siblings: Siblings | None = None) -> Iterator[Batch]:
        """A run in the process that ZeroGPU forks for it, with this object and the models in it.

        What strategies learn there is lost with that process, so such a run starts with an empty memory, and the
        visitor's memory stays empty.
        """
        yield from batches(self._session(self._models(settings), settings, Memory(), siblings))

    def _models(self, settings: Settings) -> Any:
        """The models of a run; in a process forked by ZeroGPU they are moved to its GPU. Raises Refusal."""
        if not on_zero():
            return self.model_load(settings).result()
        from playground.decoding.host_models import moved
        return moved(self.model_loader.inherited(self.model_request_for(settings)))

    def _judged(self, models: Any, settings: Settings, memory: Memory) -> Any:
        """A session that scores each lane's answer if the right answer is known."""
        session = self.prepare(models, settings, memory)
        session.judge = judging(settings.known(), self.rules.programs)
        return session

    def read(self, loading: ModelLoad, settings: Settings) -> Run | RemoteRun:
        """Start a run that only scores the prompt; raises Refusal as `start` does."""
        models = loading.result()
        return (
            RemoteRun(self._on_gpu("score", settings))
            if on_zero()
            else self.worker(models).take(self.score(models, settings))
        )

    def _score_batches(self, settings: Settings) -> Iterator[Batch]:
        yield from batches(self.score(self._models(settings), settings))

    def survey(self, loading: ModelLoad, choice: SurveySettings) -> Run | RemoteRun:
        """Start a survey, whose events are answers; raises Refusal as `start` does. The caller holds a seat for it."""
        models = loading.result()
        return (
            RemoteRun(self._on_gpu("survey", choice))
            if on_zero()
            else self.worker(models).take(survey_session(models, choice, self.rules))
        )

    def _survey_batches(self, choice: SurveySettings) -> Iterator[Batch]:
        yield from batches(survey_session(self._models(choice), choice, self.rules))

    def look(self, settings: Settings, model: str, tokens: list[int], chosen: int) -> dict[str, Any]:
        """Predictions and attention by layer of one of a run's models, before the token `chosen`; raises Refusal."""
        return next(self._on_gpu("look", settings, model, tokens, chosen))

    def _looks(self, settings: Settings, model: str, tokens: list[int], chosen: int) -> Iterator[dict[str, Any]]:
        from playground.decoding.logit_lens import look  # imports torch
        yield asdict(look(_one_of(self._models(settings), model), tokens, chosen))

    def attribute(self, settings: Settings, model: str, tokens: list[int], prompt: int, chosen: int) -> dict[str, Any]:
        """The effects of the words of a prompt of `prompt` tokens on the token `chosen` after them; raises Refusal."""
        return next(self._on_gpu("attribution", settings, model, tokens, prompt, chosen))

    def _attributions(
        self, settings: Settings, model: str, tokens: list[int], prompt: int, chosen: int
    ) -> Iterator[dict[str, Any]]:
        from playground.decoding.attribution import attribute  # imports torch

        one = _one_of(self._models(settings), model)
        yield {**asdict(attribute(one, tokens, prompt, chosen)), "piece": one.tokens.piece(chosen)}

    def continuation_tokens(self, settings: Settings, model: str, text: str) -> list[int]:
        """The tokens of a text that continues another, for one of a run's models."""
        return _one_of(self.model_load(settings).result(), model).tokens.encode_continuation(text)

    def worker(self, models: Any) -> Worker:
        """The worker of the device these models are on."""
        device = str(models.target.device)
        return self._workers.setdefault(device, Worker(MemoryWatch(device) if self.rules.public else None))

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

    def check_model(self, settings: Settings, header: dict[str, Any]) -> None:
        """Raise Refusal unless the settings of an earlier run still choose the model that generated it."""
        loaded = self.model_load(settings).result().target
        if loaded.name != header["model"] or loaded.revision != header["revision"]:
            raise Refusal(
                f"{quoted(header['model'])} generated this run, and the page has another model now: press Run first.",
                "lanes",
            )

    def health(self) -> dict[str, Health]:
        """The state of each worker, by device."""
        return {device: worker.health() for device, worker in list(self._workers.items())}

    def drain(self, sentence: str = STOPPING) -> None:
        """End every run with a message and refuse new ones."""
        self.stopping = True
        self.admission.close(sentence)
        for worker in list(self._workers.values()):
            for run in worker.runs():
                run.fail(sentence)

    def other_runs(self, models: Any, run: Run | RemoteRun) -> int:
        """The number of other runs that share the device of `run`; 0 on ZeroGPU."""
        return 0 if on_zero() else self.worker(models).others(run)

    def menu_choice(self, model: str) -> str:
        """A choice of model as the menu has it: the page's own model is the default one, also if it is named."""
        return DEFAULT if self.named(model) == self.named(DEFAULT) else model

    def default_name(self) -> str:
        return Path(self.named(DEFAULT)).name

    def named(self, model: str) -> str:
        """The name of the model behind a visitor's choice."""
        return model.strip() if model not in (DEFAULT, "") else self.model_request.model or BUNDLED[0].name


def _one_of(models: Any, name: str) -> Any:
    """The target or the draft of a run, by name."""
    is_draft = models.draft is not None and models.draft.name == name != models.target.name
    return models.draft if is_draft else models.target


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
