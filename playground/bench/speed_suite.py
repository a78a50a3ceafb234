"""All parts of the speed benchmark for one model, at every context it can read."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from playground.bench.bandwidth_limit import bytes_a_token, copied_bytes, copier
from playground.bench.baselines import Baseline, TwinModels
from playground.bench.block_timing import FORWARDS, blocks, cache_memory, filled
from playground.bench.decode_timing import endless, firsts, writers
from playground.bench.measurements import Measurement
from playground.bench.speed_defaults import FIRST, LANE, LIMIT, Grid
from playground.bench.speed_prompts import Task, read_tasks
from playground.bench.timing import TimedText, contest
from playground.engine.model import Model

Tell = Callable[[float, str], None]


@dataclass
class Suite:
    """One model under measurement. `parts` are those of standard.PARTS that are wanted, text left out: it has tasks of
    its own.
    """

    loaded: TwinModels
    grid: Grid
    parts: list[str]
    tell: Tell

    def records(self) -> Iterator[Measurement]:
        """Part by part; contexts beyond what the model reads are left out."""
        measures = {"blocks": self._blocks, "decoding": self._decoding, "first": self._first, "memory": self._memory}
        for context in self._contexts():
            task = Task(str(context), "", ids=tuple(prompt_ids(self.loaded.model, context)))
            for part in self.parts:
                yield from measures[part](task, context)

    @cached_property
    def _endless(self) -> TwinModels:
        return endless(self.loaded)

    def _contexts(self) -> list[int]:
        most = self.loaded.model.context - max(self.grid.length, *self.grid.blocks)
        return [context for context in self.grid.contexts if context <= most]

    def _blocks(self, task: Task, context: int) -> Iterator[Measurement]:
        store = filled(self.loaded.model, list(task.ids))
        for writing in self._contest("blocks", blocks(self.loaded.model, store, self.grid.blocks), task):
            yield self._record(
                "blocks",
                context,
                writing.contender,
                [seconds / FORWARDS for seconds in writing.seconds],
                writing.failure,
            )

    def _decoding(self, task: Task, context: int) -> Iterator[Measurement]:
        everyone = writers(self._endless, self.grid.length, self.grid.lanes, self.grid.compiled)
        yield from self._timed("decoding", [*everyone, copier(self.loaded.model.device)], task)

    def _first(self, task: Task, context: int) -> Iterator[Measurement]:
        yield from self._timed("first", firsts(self._endless), task)

    def _memory(self, task: Task, context: int) -> Iterator[Measurement]:
        for subject, size in cache_memory(self.loaded.model, list(task.ids)).items():
            yield self._record("memory", context, subject, [size])

    def _timed(self, part: str, everyone: list[Baseline], task: Task) -> Iterator[Measurement]:
        """Seconds a token, and whether everyone wrote what the plain lane wrote."""
        writings = self._contest(part, everyone, task)
        ours = next(writing.ids for writing in writings if writing.contender in (LANE, FIRST))
        for writing in writings:
            same = writing.ids == ours * (len(writing.ids) // max(len(ours), 1)) if writing.ids else None
            rounds = [seconds * self._share(writing) for seconds in writing.seconds]
            yield self._record(part, len(task.ids), writing.contender, rounds, writing.failure, same)

    def _share(self, writing: TimedText) -> float:
        """Which part of what it took is a token's; of a copy, what a token has to read of all the bytes that it moved.
        """
        if writing.contender != LIMIT:
            return 1 / len(writing.ids)
        halfway = len(writing.task.ids) + self.grid.length / 2
        return bytes_a_token(self.loaded.untouched, halfway) / copied_bytes(self.loaded.model.device)

    def _contest(self, part: str, everyone: list[Baseline], task: Task) -> list[TimedText]:
        name = self.loaded.model.name
        return contest(
            everyone, [task], self.grid.repeats, lambda share, text: self.tell(share, f"{name}, {part} at {text}")
        )

    def _record(
        self, part: str, context: int, subject: str, rounds: list[float], failure: str = "", same: bool | None = None
    ) -> Measurement:
        return Measurement(part, self.loaded.model.name, context, subject, [] if failure else rounds, failure, same)


def prompt_ids(model: Model, count: int) -> list[int]:
    """So many tokens of the benchmark's own prompts, over and over."""
    ids = model.tokens.encode("\n".join(task.prompt for task in read_tasks()))
    return (ids * (count // len(ids) + 1))[:count]
