"""Which attributes a value of a program has, found by static analysis in a confined child (`attributes_work`).

A program may be hostile: the child opens no file but has read the stubs of the standard library when it started, makes
no connection, and the kernel bounds the time and memory of each analysis.
"""
from __future__ import annotations

import atexit
import os
from functools import cache
from importlib.util import find_spec

from playground.algorithms.programs.attribute_bounds import BOUNDS, WAIT_SECONDS
from playground.confined.child import BrokenLimit, Busy, ConfinedChild, ConfinedTask
from playground.errors import Refusal


def check_available() -> None:
    """Raise Refusal if no program can be analysed here."""
    if find_spec("jedi") is None:
        raise Refusal(
            'monitors asks the library jedi for the names: install it with `pip install "jedi>=0.20,<0.21"`.',
            "monitors",
        )
    if not hasattr(os, "fork"):
        raise Refusal(
            "Programs are analysed in a forked process, which this system does not have: use Linux or macOS, or"
            " remove monitors.",
            "monitors",
        )


@cache
def analyst() -> ConfinedChild:
    """The child of this process that analyses programs; it ends with it."""
    made = ConfinedChild("playground.algorithms.programs.attributes_work", BOUNDS)
    atexit.register(made.close)
    return made


def attributes(program: str, below: str, seconds: float, task: ConfinedTask | None = None) -> list[str] | None:
    """Attributes of the value before the dot that ends `program`, which `below` follows; empty if it is unknown.

    None if the analysis fails, or takes more than `seconds` of processor time or too much memory. Call it from a thread
    of its own. Raises Cancelled where `task` was cancelled, and Refusal if the child does not start.
    """
    try:
        return analyst().ask([program, below], wait_seconds=WAIT_SECONDS, cpu_seconds=seconds, task=task)
    except Busy:
        return None
    except BrokenLimit as broken:
        if broken.reason != "start":
            return None
        raise Refusal("The process that analyses programs does not start: remove monitors, or try again later.",
                      "monitors") from None
