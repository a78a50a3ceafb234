"""The models of a run: the target in the weights that its lanes ask for, and an optional draft."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from playground.contract.assembly import Assembly
from playground.contract.lane_config import translating
from playground.engine.canvas.denoiser import CanvasNetwork
from playground.engine.canvas.table_denoiser import OracleDenoiser
from playground.engine.loading.load import differences
from playground.engine.model import Model
from playground.errors import Refusal
from playground.request_limits import quoted
from playground.weight_changes import adds_adapter, check_weights

AnyModel = Model | CanvasNetwork | OracleDenoiser
"""A model that continues texts, or one that fills canvases, as its `fills` says."""


def continuing(model: AnyModel) -> Model:
    """The model, if it continues texts. Raises TypeError if it fills canvases."""
    if model.fills:
        raise TypeError(f"{model.name} fills canvases")
    return model


@dataclass(frozen=True)
class Models:
    """The target and an optional draft model, which may have another vocabulary."""

    target: AnyModel
    draft: AnyModel | None = None
    # weights of draft heads that were given in place of a draft model, by strategy
    heads: Mapping[str, dict[str, Tensor]] = field(default_factory=dict, compare=False)
    # the target again with other weights, by their names as in `WeightChanges`, for lanes that ask for them
    quantized: Mapping[str, Model] = field(default_factory=dict, compare=False)
    # why weights that lanes ask for could not be loaded or made
    refused: Mapping[str, Refusal] = field(default_factory=dict, compare=False)
    loaded: AnyModel | None = None  # the target with its loaded weights, if `target` has a lane's own

    def with_weights(self, weights: str) -> Models:
        """The same with the target in other weights; raises Refusal if they were not loaded, or if an adapter has
        brought other tokens, since lanes share a prompt.
        """
        if weights in ("", self.target.quantization):
            return self
        check_weights(weights)
        if weights in self.refused:
            raise self.refused[weights]
        if weights not in self.quantized:
            raise Refusal(
                f"This lane needs {quoted(weights)} weights of {self.target.name}, which are not loaded: set the "
                "quantisation of the whole run instead.",
                "weights",
            )
        own = self.quantized[weights]
        if adds_adapter(weights) and (said := differences(self.target.tokens, own.tokens)):
            raise Refusal(
                f"The adapter has another vocabulary than {self.target.name} ({said}): choose it as the model of the "
                "run.",
                "weights",
            )
        return replace(self, target=own, loaded=self.target)

    @property
    def denoiser(self) -> CanvasNetwork | OracleDenoiser:
        """The target, if it fills canvases. Raises TypeError if it continues texts."""
        if self.target.fills:
            return self.target
        raise TypeError(f"{self.target.name} continues texts")

    @cached_property
    def differences(self) -> str:
        """How the draft's vocabulary differs from the target's, in a few words; empty if it does not."""
        return differences(self.target.tokens, self.draft.tokens) if self.draft else ""

    @property
    def draft_place(self) -> str:
        """The device of the draft, " on cuda:1"; empty if it is the device of the target."""
        return f" on {self.draft.device}" if self.draft and self.draft.device != self.target.device else ""

    def by_stream(self, assembly: Assembly) -> dict[str, Model]:
        """The models that a lane reads, by stream. Raises Refusal as `draft_for`, and TypeError for a canvas."""
        target, draft = continuing(self.target), self.draft_for(assembly)
        return {"target": target, "draft": draft} if draft else {"target": target}

    def draft_for(self, assembly: Assembly) -> Model | None:
        """The draft model, if a lane reads one.

        Raises Refusal if it needs a draft and there is none, or one with tokens that its strategies cannot translate.
        """
        drafting = [part for part in assembly.strategies() if "draft" in part.needs]
        if not drafting:
            return None
        if self.draft is None and self.heads:
            name = next(iter(self.heads))
            raise Refusal(f"A head for {name} was given in place of a draft model: choose the drafter {name}.", "draft")
        if self.draft is None:
            raise Refusal(
                f"This strategy needs a draft model and {self.target.name} has none: choose one that shares its "
                "vocabulary.",
                "draft",
            )
        if self.draft.fills:
            raise Refusal(
                f"{self.draft.name} fills masked positions and cannot draft a text: choose another draft model.",
                "draft",
            )
        same_vocabulary = [part.title for part in drafting if not part.translates]
        if same_vocabulary and self.differences:
            raise Refusal(
                f"The draft model has another vocabulary ({self.differences}), which {same_vocabulary[0]} cannot "
                f"translate: choose a draft of the same model family, or draft with {' or '.join(translating())}.",
                "draft",
            )
        return self.draft
