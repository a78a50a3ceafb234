"""An analysis that never answers, as the work of a confined child; an empty program only starts the process."""
from __future__ import annotations

from support.confined_attacks import BOUNDS as BOUNDS
from support.confined_attacks import ORDINARY
from support.confined_attacks import learn as learn


def warm() -> None:
    """Nothing is loaded."""


def answer(order: list[str], learned: None) -> list[str]:
    return ORDINARY["sleep"](None) if order[0] else []
