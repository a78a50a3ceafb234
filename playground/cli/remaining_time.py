"""Says on standard error how long a command will take, whether or not that is a terminal."""
from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import TypeVar

from playground.cli.load_models import show_progress

EARLY = 5.0  # seconds before the first estimate
PAUSE = 30.0  # seconds between the lines of a log
Made = TypeVar("Made")


def announce(sentence: str) -> None:
    show_progress(1.0, "")
    print(sentence, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A rough duration, such as "40 seconds" or "3 minutes"."""
    number, unit = (round(seconds), "second") if seconds < 90 else (round(seconds / 60), "minute")
    return f"{number} {unit}{'' if number == 1 else 's'}"


class RemainingTime:
    """A progress that says how long the rest takes at the same pace: once, and in a log, which has no progress line,
    every half minute. A share that falls begins a new part of the work.
    """

    def __init__(self) -> None:
        self._share = math.inf

    def __call__(self, share: float, text: str, left: float | None = None) -> None:
        """share: the fraction done, 0 to 1. left: seconds, where the caller knows better than the pace."""
        now = perf_counter()
        if share < self._share:
            self._first, self._start, self._due = share, now, now + EARLY
        self._share = share
        if now >= self._due and share > self._first:
            rest = (now - self._start) * (1 - share) / (share - self._first) if left is None else left
            announce(f"{share:.0%} done, about {duration(rest)} left on this machine: {text}")
            self._due = math.inf if sys.stderr.isatty() else now + PAUSE
        show_progress(share, text if left is None else f"{left:.0f} s left, {text}")


def counted(results: Iterable[Made], total: int, name: Callable[[Made], str]) -> Iterator[Made]:
    """Pass results on as they are made, with the share of `total` that is done and the time that is left."""
    progress = RemainingTime()
    progress(0.0, "warming up")
    for number, result in enumerate(results, 1):
        progress(number / total, name(result))
        yield result
