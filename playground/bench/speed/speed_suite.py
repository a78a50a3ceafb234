"""All parts of the speed benchmark for one model, at every context length it supports."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from playground.bench.measurements import Measurement
from playground.bench.speed.bandwidth_limit import bytes_a_token, copied_bytes, copier
from playground.bench.speed.baselines import Baseline, TwinModels
from playground.bench.speed.block_timing import FORWARDS, blocks, cache_memory, prefilled_cache
from playground.bench.speed.decode_timing import decode_baselines, first_token_baselines, without_end_tokens
from playground.bench.speed.speed_defaults import FIRST, LANE, LIMIT, Grid
from playground.bench.speed.speed_prompts import Task, read_tasks
from playground.bench.speed.timing import TimedText, time_rounds
from playground.engine.model import Model

ProgressCallback = Callable[[float, str], None]


@dataclass
class Suite:
    """Measures one model. `parts` is a selection of speed_defaults.PARTS without "text", which has its own tasks."""

    loaded: TwinModels
    grid: Grid
    parts: list[str]
    progress: ProgressCallback

    def records(self) -> Iterator[Measurement]:
        """Context by context, part by part. Contexts longer than the model's are left out."""
        measures = {"blocks": self._blocks, "decoding": self._decoding, "first": self._first, "memory": self._memory}
        for context in self._contexts():
            task = Task(str(context), "", ids=tuple(prompt_ids(self.loaded.model, context)))
            for part in self.parts:
                yield from measures[part](task, context)

    @cached_property
    def _without_end_tokens(self) -> TwinModels:
        return without_end_tokens(self.loaded)

    def _contexts(self) -> list[int]:
        most = self.loaded.model.context - max(self.grid.length, *self.grid.blocks)
        return [context for context in self.grid.contexts if context <= most]

    def _blocks(self, task: Task, context: int) -> Iterator[Measurement]:
        store = prefilled_cache(self.loaded.model, list(task.ids))
        for timed in self._time("blocks", blocks(self.loaded.model, store, self.grid.blocks), task):
            rounds = [seconds / FORWARDS for seconds in timed.seconds]
            yield self._record("blocks", context, timed.contender, rounds, timed.failure)

    def _decoding(self, task: Task, context: int) -> Iterator[Measurement]:
        baselines = decode_baselines(self._without_end_tokens, self.grid.length, self.grid.lanes, self.grid.compiled)
        yield from self._timed("decoding", [*baselines, copier(self.loaded.model.device)], task)

    def _first(self, task: Task, context: int) -> Iterator[Measurement]:
        yield from self._timed("first", first_token_baselines(self._without_end_tokens), task)

    def _memory(self, task: Task, context: int) -> Iterator[Measurement]:
        for subject, size in cache_memory(self.loaded.model, list(task.ids)).items():
            yield self._record("memory", context, subject, [size])

    def _timed(self, part: str, baselines: list[Baseline], task: Task) -> Iterator[Measurement]:
        """Seconds per token, and whether each baseline wrote the plain lane's text."""
        texts = self._time(part, baselines, task)
        ours = next(timed.ids for timed in texts if timed.contender in (LANE, FIRST))
        for timed in texts:
            same = timed.ids == ours * (len(timed.ids) // max(len(ours), 1)) if timed.ids else None
            rounds = [seconds * self._share(timed) for seconds in timed.seconds]
            yield self._record(part, len(task.ids), timed.contender, rounds, timed.failure, same)

    def _share(self, timed: TimedText) -> float:
        """Fraction of the measured time that one token accounts for. For the copy: bytes a token reads / bytes moved.
        """
        if timed.contender != LIMIT:
            return 1 / len(timed.ids)
        halfway = len(timed.task.ids) + self.grid.length / 2
        return bytes_a_token(self.loaded.untouched, halfway) / copied_bytes(self.loaded.model.device)

    def _time(self, part: str, baselines: list[Baseline], task: Task) -> list[TimedText]:
        name = self.loaded.model.name
        return time_rounds(
            baselines, [task], self.grid.repeats, lambda share, text: self.progress(share, f"{name}, {part} at {text}")
        )

    def _record(
        self, part: str, context: int, subject: str, rounds: list[float], failure: str = "", same: bool | None = None
    ) -> Measurement:
        return Measurement(part, self.loaded.model.name, context, subject, [] if failure else rounds, failure, same)


def prompt_ids(model: Model, count: int) -> list[int]:
    """`count` tokens of the benchmark's own prompts, repeated as needed."""
    ids = model.tokens.encode("\n".join(task.prompt for task in read_tasks()))
    return (ids * (count // len(ids) + 1))[:count]
