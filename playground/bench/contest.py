"""Everyone writes every prompt, round after round; the first round warms up and is dropped."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from playground.bench.contenders import PAIRS, Contender
from playground.bench.prompts import Task


class Spread(NamedTuple):
    """Of the measured rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass
class Writing:
    """What one contender did with one prompt: the ids it wrote, the same in each round, and the seconds it took."""

    contender: str
    task: Task
    ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"contender": self.contender, "task": self.task.task, "prompt": self.task.prompt, "tokens": len(self.ids), "token_ids": self.ids,
                "seconds": self.seconds, "tokens_per_second": Spread.of([len(self.ids) / s for s in self.seconds])._asdict()}


@dataclass
class Comparison:
    """Two contenders on one task: tokens a second of each, how many times as fast the first is, and on how many prompts they wrote the same."""

    first: str
    second: str
    task: str
    speeds: tuple[Spread, Spread]
    ratio: Spread
    same: int
    prompts: int

    def to_json(self) -> dict[str, Any]:
        speeds = {"first_tokens_per_second": self.speeds[0]._asdict(), "second_tokens_per_second": self.speeds[1]._asdict()}
        return {"first": self.first, "second": self.second, "task": self.task, **speeds, "ratio": self.ratio._asdict(),
                "same_text": self.same, "prompts": self.prompts}


def contest(everyone: list[Contender], tasks: list[Task], repeats: int, tell: Callable[[float, str], None]) -> list[Writing]:
    """Measure `repeats` rounds. Whoever begins in one round comes last in the next, so that none always follows the same other."""
    writings = [[Writing(contender.name, task) for contender in everyone] for task in tasks]
    for turn in range(repeats + 1):
        for row, task in zip(writings, tasks):
            tell((turn * len(tasks) + tasks.index(task)) / ((repeats + 1) * len(tasks)), f"round {turn} of {repeats}, {task.task}")
            for place in _order(len(everyone), turn):
                _write(everyone[place], row[place], counts=turn > 0)
    return [writing for row in writings for writing in row]


def compare(writings: list[Writing]) -> list[Comparison]:
    """Every pair that was measured, task by task; ratios are taken within a round."""
    names = {writing.contender for writing in writings}
    tasks = list(dict.fromkeys(writing.task.task for writing in writings))
    return [_compared(first, second, task, writings) for first, second in PAIRS if {first, second} <= names for task in tasks]


def _order(count: int, turn: int) -> Iterator[int]:
    return ((place + turn) % count for place in range(count))


def _write(contender: Contender, writing: Writing, counts: bool) -> None:
    asked = contender.ready(writing.task)
    start = perf_counter()
    left = contender.write(asked)
    seconds = perf_counter() - start
    writing.ids = contender.read(left)
    writing.seconds += [seconds] if counts else []


def _compared(first: str, second: str, task: str, writings: list[Writing]) -> Comparison:
    ours, theirs = ([w for w in writings if w.contender == name and w.task.task == task] for name in (first, second))
    speeds = _speeds(ours), _speeds(theirs)
    same = sum(a.ids == b.ids for a, b in zip(ours, theirs))
    return Comparison(first, second, task, (Spread.of(speeds[0]), Spread.of(speeds[1])), Spread.of([a / b for a, b in zip(*speeds)]), same, len(ours))


def _speeds(writings: list[Writing]) -> list[float]:
    """Tokens a second over all prompts of the task, round by round."""
    tokens = sum(len(writing.ids) for writing in writings)
    return [tokens / sum(seconds) for seconds in zip(*(writing.seconds for writing in writings))]
