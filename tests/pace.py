"""Time limits in seconds, scaled to the speed of the machine."""
from __future__ import annotations

from time import thread_time

TURNS_A_SECOND = 60e6
"""Of a small loop, where aims count as they stand. A guess at the machine they were met on, from how much longer other
work takes on one with 36 million; measure it there before it is trusted."""
TURNS, LOOKS = 200_000, 20


def here(seconds: float) -> float:
    """Seconds that a processor as slow, or as busy, as this one currently needs for this many seconds' work; no less if
    it is faster.
    """
    return seconds * max(1.0, min(_loop() for _ in range(LOOKS)) * TURNS_A_SECOND / TURNS)


def _loop() -> float:
    """Seconds of this thread's own time for a small loop."""
    start, total = thread_time(), 0
    for turn in range(TURNS):
        total += turn
    return thread_time() - start
