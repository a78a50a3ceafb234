"""Says on standard error how long a command will take, whether or not that is a terminal."""
from __future__ import annotations

import sys
from time import perf_counter

from playground.cli.load_models import show_progress


def announce(sentence: str) -> None:
    show_progress(1.0, "")
    print(sentence, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A rough duration, such as "40 seconds" or "3 minutes"."""
    number, unit = (round(seconds), "second") if seconds < 90 else (round(seconds / 60), "minute")
    return f"{number} {unit}{'' if number == 1 else 's'}"


class RemainingTime:
    """A progress that announces once, after the first part, how long the rest takes at the same pace."""

    def __init__(self) -> None:
        self._start, self._announced = perf_counter(), False

    def __call__(self, share: float, text: str) -> None:
        """share: the fraction done, 0 to 1."""
        if share > 0 and not self._announced:
            self._announced = True
            announce(f"About {duration((perf_counter() - self._start) * (1 - share) / share)} left on this machine.")
        show_progress(share, text)
