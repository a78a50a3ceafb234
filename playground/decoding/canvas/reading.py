"""What a forward over a canvas reads, and its share of a forward that canvases share."""
from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Positions
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from playground.decoding.requests import ForwardShare
from playground.engine.canvas.canvas_pass import CanvasPass
from playground.events import Forward

if TYPE_CHECKING:
    from playground.decoding.canvas.text import CanvasText
    from playground.engine.canvas.denoiser import CanvasStates


@dataclass(frozen=True)
class Reading:
    """What a forward over a canvas reads; positions are counted from 0 at the end of the prompt, the prompt's are
    negative.

    wanted: positions to predict; computed: positions that pass through the layers, the others keep their `states`; None
    is all. supposed: tokens read in place of masks, which are not filled. unprompted: the prompt is masked. shadows:
    positions of the answer that are also read a second time, as masks; see `CanvasPass`.
    """

    wanted: Positions[int] | None = None
    computed: Positions[int] | None = None
    states: CanvasStates | None = None
    supposed: Mapping[int, int] = field(default_factory=dict)
    unprompted: bool = False
    shadows: Positions[int] = ()

    def over(self, canvas: CanvasText) -> CanvasPass:
        """What a forward computes, with positions counted from the beginning of the prompt."""
        start, answer = canvas.sequence.start, list(canvas.ids)
        for position, token in self.supposed.items():
            answer[position] = token
        prompt = [None] * start if self.unprompted else canvas.tokens
        wanted = range(canvas.length) if self.wanted is None else self.wanted
        shadows = [start + position for position in self.shadows]
        if not hasattr(canvas.model, "new_states"):
            return CanvasPass([*prompt, *answer], range(start, start + canvas.length), shadows=shadows)
        computed = None if self.computed is None else sorted(start + position for position in self.computed)
        wanted = [start + position for position in wanted]
        copied = bool(shadows) and getattr(canvas.model, "shifted", False)
        return CanvasPass([*prompt, *answer], wanted, computed, self.states, shadows, copied)


class CanvasFeed(ForwardShare["CanvasText", CanvasPass]):
    """The share of one canvas in a forward. Canvases of one model can share a forward."""

    @property
    def rows(self) -> int:
        return len(self.work.entering)

    def describe(self) -> Forward:
        """The event for this forward, which has run. A layer may have computed more than entered the first."""
        model, size = self.stream.model, len(self.work.entries)
        flops = model.flops(self.rows, size - self.rows, model.depth)
        if self.work.computed_by_layer:
            flops = sum(model.flops(rows, size - rows, 1) for rows in self.work.computed_by_layer)
        return Forward(tokens=self.rows, context=size - self.rows, layers=model.depth, flops=flops)

    def spread(self) -> Tensor:
        """Logits [G, V] of the answer, NaN for positions that were not wanted, and of its shadows after them."""
        canvas, logits, work = self.stream, self.result(), self.work
        rows = canvas.length + len(work.shadows)
        if len(logits) == rows:
            return logits
        raw = logits.new_full((rows, logits.shape[1]), float("nan"))
        wanted = [position - canvas.sequence.start for position in work.predicted]
        raw[wanted + list(range(canvas.length, rows))] = logits
        return raw
