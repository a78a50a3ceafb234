"""Tables of measurements: a row per run, model and context, a column per subject, and ratios taken within a round."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from playground.bench.measurements import Measurement, find
from playground.bench.report_text import Rows, significant_text
from playground.bench.speed.speed_defaults import (
    ALLOCATED,
    COMPILED,
    DEVICE,
    ENGINE,
    FIRST,
    FORMULA,
    HELD,
    LANE,
    LIBRARY,
    LIBRARY_PREFILL,
    LIMIT,
    LOOP,
    SHAPES,
    SILENT_LANE,
    STATIC,
    apart,
    block,
    together,
)
from playground.bench.spread import Spread

NOT_MEASURED = "not measured"
MILLI, MEGA = 1e3, 1e-6


@dataclass(frozen=True)
class BenchRun:
    """What one command measured on one machine."""

    name: str
    device: str  # device type: cpu, cuda, mps
    records: list[Measurement]

    @classmethod
    def of(cls, name: str, document: dict[str, Any]) -> BenchRun:
        return cls(name, document["machine"]["kind"], [Measurement(**record) for record in document["records"]])


@dataclass(frozen=True)
class TimeRatio:
    """What subject `above` took, divided by what subject `below` took."""

    title: str
    above: str
    below: str


@dataclass(frozen=True)
class SpeedTable:
    """One part's table. `scale` converts seconds or bytes into the unit of the columns."""

    title: str
    note: str
    part: str
    columns: list[str]
    ratios: list[TimeRatio]
    scale: float = MILLI
    same: bool = False  # whether it has a column for texts that differ from the plain lane's

    def head(self) -> list[str]:
        return [
            "run",
            "model",
            "context",
            *self.columns,
            *(ratio.title for ratio in self.ratios),
            *["same text"] * self.same,
        ]

    def rows(self, runs: list[BenchRun]) -> Rows:
        """Header and rows; missing cells say so."""
        return [
            self.head(),
            *(
                [run.name, model, str(context), *self._cells(find(run.records, self.part, model, context))]
                for run in runs
                for model, context in self._places(run)
            ),
        ]

    def missing(self, runs: list[BenchRun]) -> Rows:
        """Placeholder rows for shapes that no run measured, and for a GPU if no run had one."""
        models = {model for run in runs for model, _ in self._places(run)}
        absent = [("-", title) for title in SHAPES.values() if title not in models]
        absent += [] if any(run.device == "cuda" for run in runs) else [("on a GPU", "all")]
        return [[run, model, "-", *[NOT_MEASURED] * (len(self.head()) - 3)] for run, model in absent]

    def _places(self, run: BenchRun) -> list[tuple[str, int]]:
        return list(dict.fromkeys((record.model, record.context) for record in run.records if record.part == self.part))

    def _cells(self, found: dict[str, Measurement]) -> list[str]:
        columns = [_cell(found.get(name), self.scale) for name in self.columns]
        ratios = [_quotient(found.get(ratio.above), found.get(ratio.below)) for ratio in self.ratios]
        return [*columns, *ratios, *[_same([found[name] for name in self.columns if name in found])] * self.same]


def tables(runs: list[BenchRun]) -> list[SpeedTable]:
    """The tables of all parts that were measured."""
    available = [
        _blocks(_numbers(runs, "blocks", block)),
        _lanes(_numbers(runs, "decoding", together)),
        _FIRST,
        _MEMORY,
        _RECORDING,
        _LIMITS,
    ]
    measured = {record.part for run in runs for record in run.records}
    return [table for table in available if table.part in measured]


def _numbers(runs: list[BenchRun], part: str, name: Callable[[int], str]) -> list[int]:
    """The block sizes or numbers of lanes that were measured: the first word of a subject's name."""
    subjects = {record.subject for run in runs for record in run.records if record.part == part}
    first_words = {int(subject.split()[0]) for subject in subjects if subject.split()[0].isdecimal()}
    return sorted(number for number in first_words if name(number) in subjects)


def _blocks(sizes: list[int]) -> SpeedTable:
    least = block(sizes[0]) if sizes else ""
    note = (
        "Milliseconds of a forward that feeds a block of tree nodes after a KV cache of the given length; the draft "
        "tree has two children per node."
    )
    return SpeedTable("One forward of a tree", note, "blocks", [block(size) for size in sizes],
                 [TimeRatio(f"{size} / {sizes[0]}", block(size), least) for size in sizes[1:]])


def _lanes(counts: list[int]) -> SpeedTable:
    columns = [LANE, *(name(count) for count in counts for name in (together, apart))]
    return SpeedTable(
        "Lanes together",
        "Milliseconds per token, over the tokens of all lanes.",
        "decoding",
        columns,
        [TimeRatio(f"together / one after the other, {count}", together(count), apart(count)) for count in counts],
        same=True,
    )


_FIRST = SpeedTable(
    "First token",
    "Milliseconds from a prompt of the given length in tokens to the first token, and of a bare prefill.",
    "first",
    [FIRST, ENGINE, LIBRARY_PREFILL],
    [TimeRatio("lane / ours", FIRST, ENGINE), TimeRatio("lane / library", FIRST, LIBRARY_PREFILL)],
    same=True,
)
_MEMORY = SpeedTable(
    "KV cache memory",
    "Megabytes of a KV cache of the given length. Formula: 2 x layers x KV heads x head_dim x bytes per number, per "
    "token. Held: the slots in use. Allocated: the tensors of a lane whose text ends there.",
    "memory",
    [FORMULA, HELD, ALLOCATED, DEVICE],
    [TimeRatio("held / formula", HELD, FORMULA), TimeRatio("allocated / formula", ALLOCATED, FORMULA)],
    MEGA,
)
_RECORDING = SpeedTable(
    "Recording",
    "Milliseconds per token of a lane that records every event, and of one that records only its text.",
    "decoding",
    [LANE, SILENT_LANE],
    [TimeRatio("recorded / not recorded", LANE, SILENT_LANE)],
    same=True,
)
_LIMITS = SpeedTable(
    "Shares of the limits",
    "Milliseconds per token after a prompt of the given length. Bandwidth limit: bytes of weights and KV cache that "
    "one token reads, divided by the bandwidth of a copy measured in the same run; a model that fits into a "
    "processor's caches can be faster. A share is the limit's time divided by the lane's: 1 is as fast.",
    "decoding",
    [LIMIT, LOOP, LANE, SILENT_LANE, LIBRARY, STATIC, COMPILED],
    [
        TimeRatio("share of the bandwidth limit", LIMIT, LANE),
        TimeRatio("share of the loop", LOOP, LANE),
        TimeRatio("generate / lane", LIBRARY, LANE),
    ],
    same=True,
)


def _cell(record: Measurement | None, scale: float) -> str:
    if record is None:
        return NOT_MEASURED
    return "failed" if record.failure else significant_text(Spread.of([value * scale for value in record.rounds]))


def _quotient(above: Measurement | None, below: Measurement | None) -> str:
    if not (above and below and above.rounds and below.rounds):
        return NOT_MEASURED
    return significant_text(Spread.of([a / b for a, b in zip(above.rounds, below.rounds)]))


def _same(records: list[Measurement]) -> str:
    """The subjects whose text differs from the plain lane's."""
    others = [record.subject for record in records if record.same is False]
    return f"not: {', '.join(others)}" if others else "all"
