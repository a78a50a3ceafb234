"""Everyone writes every prompt, round after round; the first round warms up and is dropped."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from playground.bench.baselines import PAIRS, Baseline
from playground.bench.speed_prompts import Task
from playground.bench.spread import Spread
from playground.bench.timer import Timer
from playground.errors import Refusal

MOST_LETTERS = 120  # of an error


@dataclass
class TimedText:
    """What one contender did with one prompt: the ids it wrote, the same in each round, and the seconds it took; or why
    it could not.
    """

    contender: str
    task: Task
    ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        speed = None if self.failure else Spread.of([len(self.ids) / s for s in self.seconds])._asdict()
        return {
            "contender": self.contender,
            "task": self.task.task,
            "prompt": self.task.prompt,
            "tokens": len(self.ids),
            "token_ids": self.ids,
            "seconds": self.seconds,
            "tokens_per_second": speed,
            "failure": self.failure,
        }


@dataclass
class Comparison:
    """Two contenders on one task: tokens a second of each, how many times as fast the first is, and on how many prompts
    they wrote the same.

    A speed is None for who failed, and then there is no ratio.
    """

    first: str
    second: str
    task: str
    speeds: tuple[Spread | None, Spread | None]
    ratio: Spread | None
    same: int
    prompts: int

    def to_json(self) -> dict[str, Any]:
        speeds = {"first_tokens_per_second": _told(self.speeds[0]), "second_tokens_per_second": _told(self.speeds[1])}
        return {"first": self.first, "second": self.second, "task": self.task, **speeds, "ratio": _told(self.ratio),
                "same_text": self.same, "prompts": self.prompts}


def contest(
    everyone: list[Baseline], tasks: list[Task], repeats: int, tell: Callable[[float, str], None]
) -> list[TimedText]:
    """Measure `repeats` rounds. Whoever begins in one round comes last in the next, so that none always follows the
    same other.

    Who fails at a prompt is not asked for it again.
    """
    writings = [[TimedText(contender.name, task) for contender in everyone] for task in tasks]
    for turn in range(repeats + 1):
        for row, task in zip(writings, tasks):
            tell(
                (turn * len(tasks) + tasks.index(task)) / ((repeats + 1) * len(tasks)),
                f"round {turn} of {repeats}, {task.task}",
            )
            for place in _order(len(everyone), turn):
                _write(everyone[place], row[place], counts=turn > 0)
    return [writing for row in writings for writing in row]


def compare(writings: list[TimedText]) -> list[Comparison]:
    """Every pair that was measured, task by task; ratios are taken within a round."""
    names = {writing.contender for writing in writings}
    tasks = list(dict.fromkeys(writing.task.task for writing in writings))
    return [
        _compared(first, second, task, writings)
        for first, second in PAIRS
        if {first, second} <= names
        for task in tasks
    ]


def failures(writings: list[TimedText]) -> list[str]:
    """Who could not write, and why."""
    return list(
        dict.fromkeys(f"{writing.contender} failed ({writing.failure})" for writing in writings if writing.failure)
    )


def _order(count: int, turn: int) -> Iterator[int]:
    return ((place + turn) % count for place in range(count))


def _write(contender: Baseline, writing: TimedText, counts: bool) -> None:
    if writing.failure:
        return
    try:
        asked = contender.ready(writing.task)
        with Timer(contender.device) as timer:
            left = contender.write(asked)
        writing.ids = contender.read(left)
    except Refusal:
        raise
    except Exception as error:  # a peer that cannot run here is a finding, not the end of the benchmark
        writing.failure = reason(error)
        return
    writing.seconds += [timer.seconds] if counts else []


def reason(error: Exception) -> str:
    """Kind and first line of an error, for a cell of a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:MOST_LETTERS]}" if lines else type(error).__name__


def _compared(first: str, second: str, task: str, writings: list[TimedText]) -> Comparison:
    ours, theirs = ([w for w in writings if w.contender == name and w.task.task == task] for name in (first, second))
    speeds = _speeds(ours), _speeds(theirs)
    spreads = tuple(Spread.of(speed) if speed else None for speed in speeds)
    ratio = Spread.of([a / b for a, b in zip(*speeds)]) if all(speeds) else None
    same = sum(a.ids == b.ids for a, b in zip(ours, theirs)) if all(speeds) else 0
    return Comparison(first, second, task, spreads, ratio, same, len(ours))


def _speeds(writings: list[TimedText]) -> list[float]:
    """Tokens a second over all prompts of the task, round by round; none where one of them failed."""
    if any(writing.failure for writing in writings):
        return []
    tokens = sum(len(writing.ids) for writing in writings)
    return [tokens / sum(seconds) for seconds in zip(*(writing.seconds for writing in writings))]


def _told(spread: Spread | None) -> dict[str, float] | None:
    return spread and spread._asdict()
