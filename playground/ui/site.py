"""What one process of the page owns: the models it was started with, its workers, and what it lets visitors do."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import playground
from playground.bench.questions import judging
from playground.decoding.visitor_memory import Memory
from playground.engine.catalogue import BUNDLED, PACKED, entries
from playground.errors import Refusal
from playground.request_limits import quoted
from playground.trace import Trace
from playground.ui.admission_queue import STOPPING, AdmissionQueue, Capacity, Ticket, Visitor
from playground.ui.fits import MemoryGuard
from playground.ui.frames import recording
from playground.ui.model_loader import ModelLoad, ModelLoader, ModelRequest
from playground.ui.readers import current_request
from playground.ui.settings import DEFAULT, Rules, Settings
from playground.ui.survey_run import SurveySettings, asking
from playground.ui.worker import Health, Run, Worker
from playground.ui.zero_gpu import Batch, RemoteRun, batches, lent, on_zero

ASSETS = Path(__file__).parents[2] / "assets"


def _prepare(models: Any, settings: Settings, memory: Memory):
    # not before a model is there: it brings torch along
    from playground.decoding.session import Limits, Prompt, prepare
    context = settings.context if settings.context.strip() else ""
    prompt = Prompt(settings.prompt, settings.mode == "chat", settings.system, context, settings.turns())
    return prepare(
        models, settings.recipes(), prompt, Limits(settings.seed, settings.length, settings.stops()), memory=memory
    )


def _score(models: Any, settings: Settings):
    from playground.decoding.scoring import score
    from playground.decoding.session import Prompt

    return score(
        models, Prompt(settings.prompt, settings.mode == "chat", settings.system, settings.context, settings.turns())
    )


def _load(*names: Any, **how: Any) -> Any:
    from playground.decoding.session import leave_a_core  # not before a model is wanted: it brings torch along
    leave_a_core()
    return playground.load(*names, **how)


@dataclass
class Site:
    """`load` and `prepare` are the doors to the engine; tests put others in."""

    wish: ModelRequest = field(default_factory=ModelRequest)
    rules: Rules = field(default_factory=Rules)
    load: Callable[..., Any] = _load
    prepare: Callable[[Any, Settings, Memory], Any] = _prepare
    score: Callable[[Any, Settings], Any] = _score

    def __post_init__(self) -> None:
        self.arrivals = ModelLoader(self.load, self.wish, self._check_memory)
        self.admission = AdmissionQueue(Capacity.for_visitors() if self.rules.public else Capacity())
        self.proxies = trusted_proxies()
        self._borrowed, self._borrowed_score, self._borrowed_look = (
            lent(self._batches),
            lent(self._score_batches),
            lent(self._looks),
        )
        self._borrowed_survey = lent(self._survey_batches)
        self._workers: dict[str, Worker] = {}
        self.stopping = False

    @classmethod
    def from_environment(cls, wish: ModelRequest) -> Site:
        """A Space, or PLAYGROUND_PUBLIC=1, makes the page one for strangers; PLAYGROUND_RUN_PROGRAMS=1 lets it run what
        models write there.
        """
        public = os.environ.get("PLAYGROUND_PUBLIC", "") not in ("", "0") or "SPACE_ID" in os.environ
        return cls(
            wish, Rules.for_visitors(programs=os.environ.get("PLAYGROUND_RUN_PROGRAMS") == "1") if public else Rules()
        )

    def check(self) -> None:
        """Raise Refusal for options that cannot work, before the page is up; models on the hub are looked for later."""
        if self.wish == ModelRequest():
            return
        from playground.engine.hub_files import find_source, is_folder
        from playground.engine.load import Loading  # not before there is something to check: it takes seconds
        for device in (self.wish.device, self.wish.draft_device or self.wish.device):
            Loading(device, self.wish.dtype, self.wish.quantization).resolve()
        for name in (self.wish.model, self.wish.draft):
            if name and is_folder(name):
                find_source(name)

    def warm(self, wait: bool = False) -> None:
        """Begin to load the models the page was started with."""
        arrival = self.arrivals.want(self.wish)
        if wait:
            arrival.ended.wait()

    def arrival(self, settings: Settings) -> ModelLoad:
        """The models a visitor asked for, under way or here; raises Refusal where they may not be had."""
        return self.arrivals.want(self.wish_of(settings))

    def wish_of(self, settings: Settings) -> ModelRequest:
        names = {"model": settings.model, "draft": settings.draft}
        for about, name in names.items():
            offered = (DEFAULT, "none", *(entry.name for entry in entries()), *(PACKED if about == "draft" else ()))
            if self.rules.public and name not in offered:
                raise Refusal(f"This public page offers only the models in its list, not {quoted(name)}.", about)
        chosen = self._named(settings.model.strip(), settings.draft.strip())
        return replace(
            chosen,
            dtype=settings.dtype if settings.dtype != "auto" else self.wish.dtype,
            quantization=settings.quantization if settings.quantization != "none" else self.wish.quantization,
        )

    def _named(self, model: str, draft: str) -> ModelRequest:
        """The default draft belongs to the default model: another model comes with its own."""
        own = model in (DEFAULT, "")
        return replace(self.wish, model=self.wish.model if own else model,
                       draft=draft if draft not in (DEFAULT, "") else self.wish.draft if own else "")

    def start(self, arrival: ModelLoad, settings: Settings, memory: Memory) -> Run | RemoteRun:
        """Begin a run that may use and add to a visitor's memory; raises Refusal for what the prompt or the models do
        not allow.
        """
        models = arrival.result()
        if on_zero():
            return RemoteRun(self._borrowed(settings))
        return self.worker(models).take(self._judged(models, settings, memory))

    def _batches(self, settings: Settings) -> Iterator[Batch]:
        """What a borrowed process does: it has this object from the page's process, with the models in it.

        What is learnt there ends with that process and cannot come back, so a run on a borrowed GPU begins with an
        empty memory, and the visitor's own stays empty.
        """
        yield from batches(self._judged(self.arrival(settings).result(), settings, Memory()))

    def _judged(self, models: Any, settings: Settings, memory: Memory) -> Any:
        """A session that says of each lane whether it is right, where the answer is known."""
        session = self.prepare(models, settings, memory)
        session.judge = judging(settings.known(), self.rules.programs)
        return session

    def read(self, arrival: ModelLoad, settings: Settings) -> Run | RemoteRun:
        """Begin a run that writes nothing and tells how the models read the prompt; raises Refusal as `start` does."""
        models = arrival.result()
        return (
            RemoteRun(self._borrowed_score(settings))
            if on_zero()
            else self.worker(models).take(self.score(models, settings))
        )

    def _score_batches(self, settings: Settings) -> Iterator[Batch]:
        yield from batches(self.score(self.arrival(settings).result(), settings))

    def survey(self, arrival: ModelLoad, choice: SurveySettings) -> Run | RemoteRun:
        """Begin a survey, whose events are answers; raises Refusal as `start` does. Whoever begins one holds a seat for
        it.
        """
        models = arrival.result()
        return (
            RemoteRun(self._borrowed_survey(choice))
            if on_zero()
            else self.worker(models).take(asking(models, choice, self.rules))
        )

    def _survey_batches(self, choice: SurveySettings) -> Iterator[Batch]:
        yield from batches(asking(self.arrival(choice).result(), choice, self.rules))

    def look(self, settings: Settings, model: str, tokens: list[int], chosen: int) -> dict[str, Any]:
        """What goes on inside one of a run's models where it chose a token after others; raises Refusal."""
        return next(self._borrowed_look(settings, model, tokens, chosen))

    def _looks(self, settings: Settings, model: str, tokens: list[int], chosen: int) -> Iterator[dict[str, Any]]:
        from playground.decoding.logit_lens import look  # not before a model is there: it brings torch along
        yield asdict(look(self._one_of(settings, model), tokens, chosen))

    def spelt(self, settings: Settings, model: str, text: str) -> list[int]:
        """The tokens of a text as one of a run's models goes on with it."""
        return self._one_of(settings, model).tokens.encode_further(text)

    def _one_of(self, settings: Settings, model: str) -> Any:
        """The target or the draft of a run, by name."""
        models = self.arrival(settings).result()
        return (
            models.draft
            if models.draft is not None and models.draft.name == model != models.target.name
            else models.target
        )

    def worker(self, models: Any) -> Worker:
        """The one worker of the device these models live on."""
        return self._workers.setdefault(str(models.target.device), Worker())

    def _check_memory(self, wish: ModelRequest, held: int) -> int:
        """On a public page, refuse models that do not fit beside the others; its owner's own choice is checked when it
        is loaded.
        """
        return MemoryGuard().check(wish, held) if self.rules.public and wish != self.wish else 0

    def join(self, kind: str) -> Ticket:
        """A place in the queue for whoever sends the present request; raises Refusal where the page is busy."""
        return self.admission.join(kind, self.visitor())

    def visitor(self) -> Visitor:
        """Who sends the present request."""
        return Visitor.of(current_request(), self.proxies)

    def health(self) -> dict[str, Health]:
        """How each worker is, by device."""
        return {device: worker.health() for device, worker in list(self._workers.items())}

    def drain(self, sentence: str = STOPPING) -> None:
        """End every run with a sentence and refuse new ones."""
        self.stopping = True
        self.admission.close(sentence)
        for worker in list(self._workers.values()):
            for run in worker.runs():
                run.fail(sentence)

    def beside(self, models: Any, run: Run | RemoteRun) -> int:
        """Other runs that wait for their turn on the device of `run`; nobody shares one that is lent."""
        return 0 if on_zero() else self.worker(models).others(run)

    def default_name(self) -> str:
        return Path(self.named(DEFAULT)).name

    def named(self, model: str) -> str:
        """The model that a visitor's choice means."""
        return model.strip() if model not in (DEFAULT, "") else self.wish.model or BUNDLED[0].name


def trusted_proxies() -> int:
    """How many proxies in front of the page append to X-Forwarded-For: PLAYGROUND_PROXIES, on a Space one."""
    given = os.environ.get("PLAYGROUND_PROXIES", "")
    return int(given) if given.isdecimal() else int("SPACE_ID" in os.environ)


def first_view() -> dict[str, Any] | None:
    """The recorded trace that plays before any model is here, as one frame; None where there is none to play."""
    try:
        trace = Trace.load(ASSETS / "traces" / "first_view.jsonl")
    except Refusal:
        return None
    return recording([asdict(header) for header in trace.headers], [stamped.to_json() for stamped in trace.events])
