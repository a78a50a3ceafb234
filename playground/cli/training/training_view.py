"""What `fit` and `variant` print of a training: notes, measurements in columns, and once that the loss is flat."""
from __future__ import annotations

from argparse import Namespace
from statistics import fmean
from typing import TYPE_CHECKING

from playground.events import Figure, Note

if TYPE_CHECKING:
    from playground.training.fitting import Watch

WINDOW = 3  # measurements whose mean is compared with that of as many before them
FLAT = 0.01  # share by which the loss has to fall from one window to the next


class TrainingView:
    """Called with every event of a training. `advice` follows the sentence that the loss is flat."""

    def __init__(self, advice: str = "") -> None:
        self._advice, self._head = advice, ""
        self._losses: list[float] = []
        self._warned = False

    def __call__(self, event: Figure | Note) -> None:
        if isinstance(event, Note):
            print(event.text, flush=True)
        else:
            self._print(event)
            self._look_at(event)

    def _print(self, figure: Figure) -> None:
        """One line of values under the names of the columns."""
        names = [figure.data.get("axis", "step"), *figure.data["series"]]
        cells = [str(figure.data["x"]), *(f"{value:.3f}" for value in figure.data["series"].values())]
        widths = [max(6, len(name)) for name in names]
        head = f"{figure.name}\n" + "  ".join(f"{name:>{width}}" for name, width in zip(names, widths))
        if head != self._head:
            print(head)
            self._head = head
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths)), flush=True)

    def _look_at(self, figure: Figure) -> None:
        """Say once if the losses together hardly fall any more."""
        if "loss" in f"{figure.name} {' '.join(figure.data['series'])}":
            self._losses.append(sum(figure.data["series"].values()))
            if not self._warned and is_flat(self._losses):
                self._warned = True
                print(f"The loss is flat: it fell by less than {FLAT:.0%} over {2 * WINDOW} measurements."
                      f"{self._advice}", flush=True)


def is_flat(losses: list[float]) -> bool:
    """Whether the mean of the last measurements is hardly below that of those before them."""
    if len(losses) < 2 * WINDOW:
        return False
    return fmean(losses[-WINDOW:]) > fmean(losses[-2 * WINDOW:-WINDOW]) * (1 - FLAT)


def watching(options: Namespace, advice: str = "") -> Watch:
    """Prints the notes and measurements of a training; nothing beside JSON, which has the result alone."""
    return (lambda event: None) if options.json else TrainingView(advice)
