"""The models behind visitors' settings: which ones a page lets them choose, and what is known of these before they are
loaded.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from playground.contract.model_fit import attention_of
from playground.decoding.lane_checks import Surroundings
from playground.engine.checkpoint.catalogue import BUNDLED, PACKED, entries, listed_attention, partner
from playground.errors import Refusal
from playground.request_limits import Rules, quoted
from playground.run_request import DEFAULT, NO_DRAFT
from playground.ui.components.settings import Settings
from playground.ui.server.model_loader import ModelLoad, ModelLoader, ModelRequest
from playground.weight_changes import WeightChanges, adds_adapter


@dataclass(frozen=True)
class ChosenModels:
    """Reads choices of models from settings. `own`: the models of the page, for settings that choose none."""

    own: ModelRequest
    rules: Rules
    loader: ModelLoader

    def named(self, model: str) -> str:
        """The name of the model behind a visitor's choice."""
        return model.strip() if model not in (DEFAULT, "") else self.own.model or BUNDLED[0].name

    def menu_choice(self, model: str) -> str:
        """A choice of model as the menu has it: the page's own model is the default one, also if it is named."""
        return DEFAULT if self.named(model) == self.named(DEFAULT) else model

    def default_name(self) -> str:
        return Path(self.named(DEFAULT)).name

    def request(self, settings: Settings) -> ModelRequest:
        """What these settings ask to be loaded; raises Refusal for models that the page does not offer."""
        names = {"model": settings.model, "draft": settings.draft}
        for about, name in names.items():
            offered = (DEFAULT, NO_DRAFT, *(entry.name for entry in entries()), *(PACKED if about == "draft" else ()))
            if self.rules.public and name not in offered:
                raise Refusal(f"This public page offers only the models in its list, not {quoted(name)}.", about)
        chosen = self._named(settings.model.strip(), settings.draft.strip())
        return replace(
            chosen,
            dtype=settings.dtype if settings.dtype != "auto" else self.own.dtype,
            quantization=settings.quantization if settings.quantization != "none" else self.own.quantization,
        )

    def _named(self, model: str, draft: str) -> ModelRequest:
        """The default draft belongs to the default model; another model has its own."""
        own = model in (DEFAULT, "")
        return replace(self.own, model=self.own.model if own else model,
                       draft=draft if draft not in (DEFAULT, "") else self.own.draft if own else "")

    def load(self, settings: Settings) -> ModelLoad:
        """The models that a visitor requested, loaded or being loaded; raises Refusal if they are not allowed."""
        return self.loader.request(self.request(settings))

    def weight_requests(self, settings: Settings) -> dict[str, ModelRequest]:
        """The targets with weights of their own that single lanes ask for, by these weights; raises Refusal for
        adapters and changes of layers on a public page, which loads only what it lists.
        """
        if self.rules.public and any(map(adds_adapter, settings.own_weights())):
            raise Refusal(
                "This public page adds no adapters to its models: run the playground yourself, or choose other weights"
                " for the lane.",
                "weights",
            )
        if self.rules.public and any(WeightChanges.read(weights).layers for weights in settings.own_weights()):
            raise Refusal(
                "This public page changes no weights, which takes minutes: run the playground yourself, or choose "
                "int8, nf4 or fp4 for the lane.",
                "weights",
            )
        request = replace(self.request(settings), draft=NO_DRAFT)
        return {name: replace(request, quantization=name) for name in settings.own_weights()}

    def weight_loads(self, settings: Settings) -> dict[str, ModelLoad]:
        """The models of `weight_requests`, loaded or being loaded."""
        return {name: self.loader.request(request) for name, request in self.weight_requests(settings).items()}

    def check_tools(self, settings: Settings) -> None:
        """Raise Refusal for tools that cannot be used. The model's chat template is asked only if it is loaded."""
        settings.check_tools(self.rules)
        if settings.tools.strip() and (target := self._loaded(settings)) is not None:
            target.tokens.check_tools()

    def takes_tools(self, settings: Settings) -> bool:
        """Whether the chosen model's chat template describes tools; true if that is not known before it is loaded.
        Those of the bundled models do not.
        """
        if self.named(settings.model) in (entry.name for entry in BUNDLED):
            return False
        try:
            if (target := self._loaded(settings)) is not None:
                target.tokens.check_tools()
        except Refusal as refusal:
            return refusal.about != "tools"  # any other is about the models, and shown when they are loaded
        return True

    def has_draft(self, settings: Settings) -> bool:
        """Whether a draft model belongs to the chosen models, as far as is known before they are loaded."""
        try:
            chosen = self.request(settings)
        except Refusal:  # about the models, which is shown when they are loaded
            return True
        return (chosen.draft or partner(chosen.model or BUNDLED[0].name)) not in ("", NO_DRAFT)

    def attention(self, settings: Settings) -> str | None:
        """The attention of the chosen model if it fills masked positions; empty if it continues text, None if that is
        not known before it is loaded.
        """
        try:
            target = self._loaded(settings)
        except Refusal:  # about the models, which is shown when they are loaded
            return None
        return attention_of(target) if target else listed_attention(self.named(settings.model))

    def _loaded(self, settings: Settings) -> Any:
        """The chosen target, if it is loaded."""
        return self.loader.loaded_target(self.request(settings))

    def surroundings(self, settings: Settings) -> Surroundings:
        """What lanes need besides their own settings, as far as it is known before the models are loaded."""
        return Surroundings(
            settings.context, self.has_draft(settings), self.named(settings.model), self.attention(settings),
            self._attends(settings),
        )

    def _attends(self, settings: Settings) -> bool:
        """Whether the attention of the target is the playground's own; true if it is not loaded."""
        try:
            return getattr(self._loaded(settings), "attends", True)
        except Refusal:  # about the models, which is shown when they are loaded
            return True

    def check_same(self, settings: Settings, header: dict[str, Any]) -> None:
        """Raise Refusal unless the settings of an earlier run still choose the model that generated it."""
        loaded = self.load(settings).result().target
        if loaded.name != header["model"] or loaded.revision != header["revision"]:
            raise Refusal(
                f"{quoted(header['model'])} generated this run, and the page has another model now: press Run first.",
                "lanes",
            )

    def continuation_tokens(self, settings: Settings, model: str, text: str) -> list[int]:
        """The tokens of a text that continues another, for one of a run's models."""
        return one_of(self.load(settings).result(), model).tokens.encode_continuation(text)


def one_of(models: Any, name: str) -> Any:
    """The target or the draft of a run, by name."""
    is_draft = models.draft is not None and models.draft.name == name != models.target.name
    return models.draft if is_draft else models.target
