"""What a page computes with its models: runs, scores, surveys, and looks into a single token."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from playground.decoding.forked_session import ForkedSession, Siblings
from playground.decoding.visitor_memory import Memory
from playground.errors import Refusal
from playground.questions.questions import judging
from playground.ui.benchmark.survey_run import SurveySettings, survey_session
from playground.ui.components.settings import Settings
from playground.ui.models.chosen_models import ChosenModels, one_of
from playground.ui.server.zero_gpu import Batch, batches, on_zero


def prepare_run(models: Any, settings: Settings, memory: Memory) -> Any:
    from playground.decoding.limits import Limits
    from playground.decoding.prompt import Prompt
    from playground.decoding.session import prepare  # imports torch
    return prepare(models, settings.configs(), Prompt.of(settings), Limits.of(settings), memory=memory)


def score_prompt(models: Any, settings: Settings) -> Any:
    from playground.decoding.prompt import Prompt
    from playground.decoding.scoring import score
    return score(models, Prompt.of(settings))


@dataclass
class GpuWork:
    """Makes sessions, and iterates them where no worker can: as `serve`, in the process that ZeroGPU forks for a call,
    with this object and the models in it.
    """

    chosen: ChosenModels
    prepare: Callable[[Any, Settings, Memory], Any]
    score: Callable[[Any, Settings], Any]

    def session(self, models: Any, settings: Settings, memory: Memory, siblings: Siblings | None = None) -> Any:
        """The session of a run; with siblings, of the lane at their free place. Raises Refusal."""
        models = self._with_weights(models, settings)
        if siblings is None:
            return self._judged(models, settings, memory)
        alone = replace(settings, lanes=settings.lanes[siblings.place:siblings.place + 1])
        return ForkedSession(self._judged(models, alone, memory), siblings)

    def survey(self, models: Any, choice: SurveySettings) -> Any:
        """The session of a survey, whose events are answers."""
        return survey_session(models, choice, self.chosen.rules)

    def serve(self, kind: str, *given: Any) -> Iterator[Any]:
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
        """A run whose memory starts empty, since what strategies learn is lost with the forked process."""
        yield from batches(self.session(self._models(settings), settings, Memory(), siblings))

    def _score_batches(self, settings: Settings) -> Iterator[Batch]:
        yield from batches(self.score(self._models(settings), settings))

    def _survey_batches(self, choice: SurveySettings) -> Iterator[Batch]:
        yield from batches(self.survey(self._models(choice), choice))

    def _looks(self, settings: Settings, model: str, tokens: list[int], chosen: int) -> Iterator[dict[str, Any]]:
        from playground.decoding.logit_lens import look  # imports torch
        yield asdict(look(one_of(self._models(settings), model), tokens, chosen))

    def _attributions(
        self, settings: Settings, model: str, tokens: list[int], prompt: int, chosen: int
    ) -> Iterator[dict[str, Any]]:
        from playground.decoding.attribution import attribute  # imports torch

        one = one_of(self._models(settings), model)
        yield {**asdict(attribute(one, tokens, prompt, chosen)), "piece": one.tokens.piece(chosen)}

    def _models(self, settings: Settings) -> Any:
        """The models of a run; in a process forked by ZeroGPU they are moved to its GPU. Raises Refusal."""
        if not on_zero():
            return self.chosen.load(settings).result()
        from playground.decoding.host_models import moved
        return moved(self.chosen.loader.inherited(self.chosen.request(settings)))

    def _with_weights(self, models: Any, settings: Settings) -> Any:
        """Models that include those of lanes with weights of their own; a lane whose weights are refused fails alone.
        """
        if not settings.own_weights():
            return models
        if on_zero():
            requests = self.chosen.weight_requests(settings)
            waiting = {name: partial(self.chosen.loader.inherited, request) for name, request in requests.items()}
        else:
            waiting = {name: loading.result for name, loading in self.chosen.weight_loads(settings).items()}
        loaded, refused = {}, {}
        for name, result in waiting.items():
            try:
                loaded[name] = result().target
            except Refusal as refusal:
                refused[name] = refusal
        return replace(models, quantized=loaded, refused=refused)

    def _judged(self, models: Any, settings: Settings, memory: Memory) -> Any:
        """A session that scores each lane's answer if the right answer is known."""
        session = self.prepare(models, settings, memory)
        session.judge = judging(settings.known(), self.chosen.rules.programs)
        return session
