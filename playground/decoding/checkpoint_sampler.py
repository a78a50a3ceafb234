"""The processors that the author of a checkpoint set in generation_config.json, as a sampler of every lane."""
from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from playground.contract import Sampler
from playground.contract.assembly import Assembly
from playground.decoding.lane import Lane
from playground.decoding.limits import Limits
from playground.engine.text.generation_settings import TOGGLES, GenerationSettings, TextFrame, kept_scores
from playground.events import Note

if TYPE_CHECKING:
    from playground.decoding.canvas import Canvas
    from playground.decoding.models import AnyModel

NAME = "generation_config"


class CheckpointSampler(Sampler):
    """Applies the library's own processors to every row, of the target and of a draft alike.

    It is no strategy that can be chosen: it comes with the model, so it has no entry in the registry.
    """

    title = "Settings of the checkpoint"
    stage, rank, draws = "penalty", -1, False

    def set_up(self, settings: GenerationSettings, most: int, without: set[str]) -> CheckpointSampler:
        """Of these settings, for texts of at most `most` tokens, prompt included, without the entries that the lane
        replaces.
        """
        self.settings, self.most, self.without = settings, most, without
        self._processors = None
        return self

    def values(self):
        return {name: _plain(value) for name, value in self.settings.applied.items() if name not in self.without}

    def apply(self, scores, histories):
        if self._processors is None:
            at = TextFrame(self.start, self.most, sorted(self.end_ids), scores.device)
            self._processors = self.settings.processors(at, self.without)
        rows = [
            self._processors(torch.tensor([history], device=scores.device), row[None])
            for row, history in zip(scores.clone(), histories)
        ]
        return kept_scores(scores, torch.cat(rows))


CheckpointSampler.name = NAME  # here, because a class that is made with a name is registered


def add_settings(assembly: Assembly, settings: GenerationSettings | None, most: int) -> None:
    """Let a lane apply the settings of its model, but for those that a toggle of the lane sets."""
    if settings is None or assembly.decoder.kind == "canvas_decoder":
        return
    toggles = {sampler.name for sampler in assembly.samplers}
    without = {entry for entry, toggle in TOGGLES.items() if toggle in toggles}
    if set(settings.applied) - without:
        assembly.samplers.insert(_after_mixing(assembly), CheckpointSampler().set_up(settings, most, without))


def with_stops(limits: Limits, settings: GenerationSettings | None) -> Limits:
    """The limits with the stop strings of a checkpoint."""
    more = [text for text in (settings.stop if settings else ()) if text not in limits.stop]
    return replace(limits, stop=(*limits.stop, *more)) if more else limits


def note_settings(lane: Lane | Canvas, target: AnyModel) -> None:
    """Record in a lane what the author of its model set for the choice of tokens, if anything."""
    settings = getattr(target, "settings", None)
    if settings and isinstance(lane, Lane) and (line := settings.without_lengths().line()):
        lane.record(Note(f"Of the generation_config.json of {target.name}: {line}."))


def _after_mixing(assembly: Assembly) -> int:
    """The place of the first sampler that is no mixing one."""
    return sum(sampler.stage == "mix" for sampler in assembly.samplers)


def _plain(value: object) -> str | int | float | bool:
    if isinstance(value, str | int | float | bool):
        return value
    return f"{len(value)} entries" if isinstance(value, Sized) else str(value)
