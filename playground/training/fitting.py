"""One training of what a strategy needs to know of a target: what it reads, how it is watched, and where it goes on."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from playground.engine.checkpoint.hub_files import Progress, unseen
from playground.events import Figure, Note

if TYPE_CHECKING:
    from torch import Tensor

    from playground.engine.model import Model

Watch = Callable[[Figure | Note], None]  # called with every note and measurement of a training


def unwatched(event: Figure | Note) -> None:
    """A `Watch` that ignores everything."""


@dataclass(frozen=True)
class Fitting:
    """A training for one target. Without texts, it makes its own.

    checkpoint: the file from which an interrupted training goes on, deleted at the end.
    epochs: passes over the texts; 0 is the strategy's own number.
    """

    model: Model
    checkpoint: Path
    texts: Sequence[str] = ()
    seed: int = 0
    watch: Watch = unwatched
    progress: Progress = unseen
    epochs: int = 0


def finish(events: Iterator[Figure | Note], watch: Watch) -> dict[str, Tensor]:
    """Watch a training to its end, and return what it returns: tensors by name."""
    while True:
        try:
            watch(next(events))
        except StopIteration as end:
            return end.value
