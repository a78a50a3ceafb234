"""Times baselines on prompts, round by round; the first round is a warm-up and is dropped."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from playground.bench.speed.baselines import Baseline
from playground.bench.speed.speed_prompts import Task
from playground.bench.speed.text_baselines import PAIRS
from playground.bench.speed.timer import Timer
from playground.bench.spread import Spread, as_json
from playground.errors import Refusal

ERROR_LENGTH = 120  # characters of an error message that are kept


@dataclass
class TimedText:
    """One baseline on one prompt: the ids it wrote, the same in each round, and seconds per round, or why it failed."""

    contender: str
    task: Task
    ids: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        speed = None if self.failure else Spread.of([len(self.ids) / seconds for seconds in self.seconds])._asdict()
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
    """Two baselines on one task: tokens/s of each, their ratio, and the number of prompts with identical texts.

    The speed of a failed baseline is None, and so is the ratio then.
    """

    first: str
    second: str
    task: str
    speeds: tuple[Spread | None, Spread | None]
    ratio: Spread | None
    same: int
    prompts: int

    def to_json(self) -> dict[str, Any]:
        first, second, ratio = map(as_json, (*self.speeds, self.ratio))
        return {"first": self.first, "second": self.second, "task": self.task, "first_tokens_per_second": first,
                "second_tokens_per_second": second, "ratio": ratio, "same_text": self.same, "prompts": self.prompts}


def time_rounds(
    baselines: list[Baseline], tasks: list[Task], repeats: int, progress: Callable[[float, str], None]
) -> list[TimedText]:
    """Measure `repeats` rounds. The order rotates from round to round, so that none always follows the same other.

    A baseline that failed on a prompt is skipped on it from then on.
    """
    texts = [[TimedText(baseline.name, task) for baseline in baselines] for task in tasks]
    for round in range(repeats + 1):
        for number, (task_texts, task) in enumerate(zip(texts, tasks)):
            share = (round * len(tasks) + number) / ((repeats + 1) * len(tasks))
            progress(share, f"round {round} of {repeats}, {task.task}")
            for place in _order(len(baselines), round):
                _write(baselines[place], task_texts[place], measured=round > 0)
    return [text for task_texts in texts for text in task_texts]


def compare(texts: list[TimedText]) -> list[Comparison]:
    """Every pair of PAIRS that was measured, task by task; ratios are taken within a round."""
    names = {text.contender for text in texts}
    tasks = list(dict.fromkeys(text.task.task for text in texts))
    return [
        _compared(first, second, task, texts)
        for first, second in PAIRS
        if {first, second} <= names
        for task in tasks
    ]


def failures(texts: list[TimedText]) -> list[str]:
    """A line for each failure, without repetitions."""
    return list(dict.fromkeys(f"{text.contender} failed ({text.failure})" for text in texts if text.failure))


def _order(count: int, round: int) -> Iterator[int]:
    return ((place + round) % count for place in range(count))


def _write(baseline: Baseline, text: TimedText, measured: bool) -> None:
    if text.failure:
        return
    try:
        prepared = baseline.ready(text.task)
        with Timer(baseline.device) as timer:
            output = baseline.write(prepared)
        text.ids = baseline.read(output)
    except Refusal:
        raise
    except Exception as error:  # a baseline that cannot run here is a finding, not the end of the benchmark
        text.failure = reason(error)
        return
    text.seconds += [timer.seconds] if measured else []


def reason(error: Exception) -> str:
    """Type and first line of an error, for a table cell."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:ERROR_LENGTH]}" if lines else type(error).__name__


def _compared(first: str, second: str, task: str, texts: list[TimedText]) -> Comparison:
    ours, theirs = ([t for t in texts if t.contender == name and t.task.task == task] for name in (first, second))
    speeds = _speeds(ours), _speeds(theirs)
    spreads = tuple(Spread.of(speed) if speed else None for speed in speeds)
    ratio = Spread.of([a / b for a, b in zip(*speeds)]) if all(speeds) else None
    same = sum(a.ids == b.ids for a, b in zip(ours, theirs)) if all(speeds) else 0
    return Comparison(first, second, task, spreads, ratio, same, len(ours))


def _speeds(texts: list[TimedText]) -> list[float]:
    """Tokens/s over all prompts of the task, round by round; empty if one of them failed."""
    if any(text.failure for text in texts):
        return []
    tokens = sum(len(text.ids) for text in texts)
    return [tokens / sum(seconds) for seconds in zip(*(text.seconds for text in texts))]
