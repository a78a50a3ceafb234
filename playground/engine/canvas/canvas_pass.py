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
    `states` has them; None is all.
    """

    canvas: Sequence[int | None]
    wanted: Sequence[int] | None = None
    computed: Sequence[int] | None = None
    states: Any = None  # CanvasStates of a denoiser, or None
    computed_by_layer: list[int] = field(default_factory=list)  # number of positions, once the forward has run
    given = None  # no token ids that only the device knows, as a `ForwardInput` may have

    @cached_property
    def predicted(self) -> list[int]:
        """Positions to predict."""
        return list(range(len(self.canvas)) if self.wanted is None else self.wanted)

    @cached_property
    def entering(self) -> list[int]:
        """Positions that pass through the first layer."""
        return list(range(len(self.canvas)) if self.computed is None else self.computed)
