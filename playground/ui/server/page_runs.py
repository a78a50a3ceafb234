"""The runs of a page: each is taken by the worker of its models' device, or runs in a process of ZeroGPU."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from playground.decoding.forked_session import Siblings
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.remote.remote_server import RemoteServer
from playground.request_limits import Rules
from playground.run_request import LANES
from playground.ui.benchmark.survey_run import SurveySettings
from playground.ui.components.settings import Settings
from playground.ui.server.gpu_work import GpuWork
from playground.ui.server.memory_watch import MemoryWatch
from playground.ui.server.model_loader import ModelLoad
from playground.ui.server.worker import Health, Run, Worker
from playground.ui.server.zero_gpu import RemoteRun, on_gpu, on_zero


class PageRuns:
    """Starts runs, and finds them by name for as long as someone keeps them."""

    def __init__(self, work: GpuWork, rules: Rules):
        self.work, self._rules = work, rules
        self._on_gpu = on_gpu(work.serve)
        self._kept: WeakValueDictionary[str, Run | RemoteRun] = WeakValueDictionary()
        self._workers: dict[str, Worker] = {}

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
            session = self.work.session(models, settings, memory, siblings)
            if server and not siblings:  # in a fork, the server's lane is one of the siblings
                self._add_remote(session, server, settings)
            run = self.worker(models).take(session)
        self._kept[run.name] = run
        return run

    def _add_remote(self, session: Any, server: RemoteServer, settings: Settings) -> None:
        from playground.decoding.limits import Limits
        from playground.decoding.prompt import Prompt
        from playground.remote.remote_lane import add_lane  # imports torch
        if self._rules.public:
            raise Refusal("This public page does not connect to other servers: run the playground yourself.", "remote")
        if len(settings.lanes) >= LANES:
            raise Refusal(f"With the remote lane there are more than {LANES} lanes: remove one of the others.", "lanes")
        add_lane(session, server, Prompt.of(settings), Limits.of(settings))

    def read(self, loading: ModelLoad, settings: Settings) -> Run | RemoteRun:
        """Start a run that only scores the prompt; raises Refusal as `start` does."""
        models = loading.result()
        if on_zero():
            return RemoteRun(self._on_gpu("score", settings))
        return self.worker(models).take(self.work.score(models, settings))

    def survey(self, loading: ModelLoad, choice: SurveySettings) -> Run | RemoteRun:
        """Start a survey, whose events are answers; raises Refusal as `start` does. The caller holds a seat for it."""
        models = loading.result()
        if on_zero():
            return RemoteRun(self._on_gpu("survey", choice))
        return self.worker(models).take(self.work.survey(models, choice))

    def look(self, settings: Settings, model: str, tokens: list[int], chosen: int) -> dict[str, Any]:
        """Predictions and attention by layer of one of a run's models, before the token `chosen`; raises Refusal."""
        return next(self._on_gpu("look", settings, model, tokens, chosen))

    def attribute(self, settings: Settings, model: str, tokens: list[int], prompt: int, chosen: int) -> dict[str, Any]:
        """The effects of the words of a prompt of `prompt` tokens on the token `chosen` after them; raises Refusal."""
        return next(self._on_gpu("attribution", settings, model, tokens, prompt, chosen))

    def find(self, name: str) -> Run | RemoteRun | None:
        return self._kept.get(name)

    def worker(self, models: Any) -> Worker:
        """The worker of the device these models are on."""
        device = str(models.target.device)
        return self._workers.setdefault(device, Worker(MemoryWatch(device) if self._rules.public else None))

    def others(self, models: Any, run: Run | RemoteRun) -> int:
        """The number of other runs that share the device of `run`; 0 on ZeroGPU."""
        return 0 if on_zero() else self.worker(models).others(run)

    def __iter__(self) -> Iterator[Run]:
        """Those that workers have now."""
        for worker in list(self._workers.values()):
            yield from worker.runs()

    def health(self) -> dict[str, Health]:
        """The state of each worker, by device."""
        return {device: worker.health() for device, worker in list(self._workers.items())}
