"""The input of one canvas in a forward that fills masks."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass
class CanvasPass:
    """A canvas, None where it is masked, and what a forward computes of it.

    wanted: positions to predict; computed: positions that pass through the layers, ascending, the others take part as
    `states` has them; None is all. shadows: positions that are read a second time, as masks that the canvas does not
    see, and predicted without the token that they hold; see `playground.engine.canvas.shadows`.
    """

    canvas: Sequence[int | None]
    wanted: Sequence[int] | None = None
    computed: Sequence[int] | None = None
    states: Any = None  # CanvasStates of a denoiser, or None
    shadows: Sequence[int] = ()
    copied: bool = False  # a shadow is predicted by a copy of the token before it, as a shifted model needs it
    computed_by_layer: list[int] = field(default_factory=list)  # number of positions, once the forward has run
    given = None  # no token ids that only the device knows, as a `ForwardInput` may have

    @cached_property
    def predicted(self) -> list[int]:
        """Positions to predict."""
        return list(range(len(self.canvas)) if self.wanted is None else self.wanted)

    @cached_property
    def entering(self) -> list[int]:
        """Entries that pass through the first layer: positions, and everything beside the canvas."""
        beside = range(len(self.canvas), len(self.entries))
        return [*(range(len(self.canvas)) if self.computed is None else self.computed), *beside]

    @cached_property
    def entries(self) -> list[int | None]:
        """The tokens of the canvas, of its shadows, and of the copies before them; None for a mask."""
        copies = [self.canvas[place - 1] for place in self.shadows] if self.copied else []
        return [*self.canvas, *[None] * len(self.shadows), *copies]

    @cached_property
    def places(self) -> list[int]:
        """The position of each entry."""
        copies = [place - 1 for place in self.shadows] if self.copied else []
        return [*range(len(self.canvas)), *self.shadows, *copies]

    @property
    def shadowing(self) -> range:
        """The entries that predict the shadows, in their order."""
        return range(len(self.entries) - len(self.shadows), len(self.entries))
