"""How often execution passes from one module of the project to another per token: `python tools/module_changes.py`.

The lower the count, the easier it is to follow one token through the code. Counted are calls, and resumed generators,
from one module of `playground` or `strategies` to another; other modules, such as torch, are ignored.
"""
from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the file is run as a script

from playground import load
from playground.contract.lane_config import LaneConfig
from playground.decoding.limits import Limits
from playground.decoding.prompt import Prompt
from playground.decoding.session import Session, prepare

PACKAGES = ("playground.", "strategies.")
WARM_UP = 4  # steps before the counted one: the prefill, and what is computed once
PROMPT = "Mia had a red boat. Mia had a green boat. Mia had a "


class ModuleChanges:
    """Counts changes of module inside its `with` statement, in this thread, by (from, to)."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._stack = [""]  # modules of the project's active frames

    def __enter__(self) -> ModuleChanges:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)

    @property
    def total(self) -> int:
        return self.counts.total()

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(PACKAGES):
            return
        if event == "call":
            if module != self._stack[-1]:
                self.counts[self._stack[-1], module] += 1
            self._stack.append(module)
        elif event == "return":
            self._stack.pop()


def greedy() -> Session:
    """One lane whose step is one recorded token."""
    return _session(LaneConfig("greedy"))


def speculative() -> Session:
    """One lane whose step is one recorded round of a draft model with four draft tokens."""
    return _session(LaneConfig("speculative", {}, [("draft_model", {}), ("greedy_match", {})]))


def changes(start: Callable[[], Session]) -> ModuleChanges:
    """The changes of module in one step of a session, up to the next commit."""
    session = start()
    for _ in range(WARM_UP):
        session.step()
    with ModuleChanges() as counted:
        session.step()
    return counted


def _session(lane: LaneConfig) -> Session:
    return prepare(load(), [lane], Prompt(PROMPT), Limits(0, 64))


def main() -> None:
    for name, start in (("greedy token", greedy), ("speculative round", speculative)):
        counted = changes(start)
        print(f"{counted.total} changes of module in one {name}:")
        for (before, after), count in counted.counts.most_common(30):
            print(f"{count:5}  {before or 'outside'} -> {after}")


if __name__ == "__main__":
    main()
