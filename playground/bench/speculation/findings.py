"""What the answers came to: a row for each lane and task, ours against the library's own, and the work of a round."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from playground.bench.effects.answer_comparison import of
from playground.bench.results import ResultRow, table, time_ratio
from playground.bench.speculation.observe import Guessed, ObservedRound
from playground.bench.speculation.speculative_lanes import AIMS, PLAIN, Pair
from playground.bench.spread import Spread

FULL = (48, 80)  # guesses of a round that stands for those of 64
MOST_WORK = 0.002  # seconds that such a round may take besides its forwards


@dataclass(frozen=True)
class LaneResult:
    """One lane on one task. `times` is how many times as fast as the plain lane it is, within each round of the
    measurement.
    """

    row: ResultRow
    times: Spread | None

    @property
    def tokens_per_target_forward(self) -> float | None:
        """Over the tokens after the first; the prompt's pass is left out."""
        return 1 / self.row.target_forwards if self.row.target_forwards else None

    @property
    def same(self) -> bool:
        """Whether every text is the plain lane's, and there is one."""
        return self.row.same_text == self.row.compared > 0

    @property
    def reaches(self) -> bool:
        """Whether it is as fast as its task asks for, by the median, and nothing failed."""
        aim = AIMS.get(self.row.task)
        return bool(aim and self.times and self.times.median >= aim and self.same and not self.row.failed)

    def to_json(self) -> dict[str, Any]:
        return self.row.to_json() | {
            "tokens_per_target_forward": self.tokens_per_target_forward,
            "times_as_fast": _told(self.times),
            "aim": AIMS.get(self.row.task),
            "reaches": self.reaches,
        }


def standings(answers: Sequence[Guessed]) -> list[LaneResult]:
    """Task by task, the plain lane first."""
    return [
        LaneResult(row, time_ratio(of(answers, PLAIN, row.task), of(answers, row.entrant, row.task)))
        for row in table(answers)
    ]


@dataclass(frozen=True)
class Match:
    """A lane of ours and the library's own on one task, guessing equally much. `times`: how many times as fast as
    theirs ours is.
    """

    task: str
    pair: Pair
    times: Spread | None
    accepted: tuple[float | None, float | None]  # ours, theirs
    per_forward: tuple[float | None, float | None]  # tokens per target forward: ours, theirs
    same_text: int
    compared: int

    @property
    def slower(self) -> bool:
        return self.times is not None and self.times.median < 1

    @property
    def accepts_less(self) -> bool:
        ours, theirs = self.accepted
        return theirs is not None and (ours or 0.0) < theirs

    def to_json(self) -> dict[str, Any]:
        sides = ("ours", "theirs")
        return {
            "task": self.task,
            **dict(zip(sides, (self.pair.ours, self.pair.theirs))),
            "times_as_fast": _told(self.times),
            "accepted": dict(zip(sides, self.accepted)),
            "tokens_per_target_forward": dict(zip(sides, self.per_forward)),
            "same_text": self.same_text,
            "compared": self.compared,
            "slower": self.slower,
            "accepts_less": self.accepts_less,
        }


def matches(answers: Sequence[Guessed], pairs: Iterable[Pair]) -> list[Match]:
    """Pair by pair, task by task."""
    standing = {(found.row.entrant, found.row.task): found for found in standings(answers)}
    tasks = dict.fromkeys(answer.question.task for answer in answers)
    return [
        _match(answers, pair, task, standing[pair.ours, task], standing[pair.theirs, task])
        for pair in pairs
        for task in tasks
    ]


def _match(answers: Sequence[Guessed], pair: Pair, task: str, ours: LaneResult, theirs: LaneResult) -> Match:
    written, besides = of(answers, pair.ours, task), of(answers, pair.theirs, task)
    texts = {(answer.number, answer.round): answer.token_ids for answer in besides}
    same = sum(texts.get((answer.number, answer.round)) == answer.token_ids for answer in written)
    return Match(task, pair, time_ratio(besides, written), (ours.row.acceptance, theirs.row.acceptance),
                 (ours.tokens_per_target_forward, theirs.tokens_per_target_forward), same, len(written))


@dataclass(frozen=True)
class RoundOverhead:
    """Of all rounds of a lane, and of its full ones: how many, the median of the guesses in each, of the seconds that
    no forward took, and of the passes that were not the target's."""

    entrant: str
    rounds: int
    guesses: float
    passes: float
    seconds: float
    full: int
    full_seconds: float | None  # None where it never guesses so much at once

    @classmethod
    def of(cls, entrant: str, rounds: Sequence[ObservedRound]) -> RoundOverhead:
        full = [found.work for found in rounds if FULL[0] <= found.guesses <= FULL[1]]
        guesses, work, passes = (median(found) for found in zip(*rounds))
        return cls(entrant, len(rounds), guesses, passes, work, len(full), median(full) if full else None)

    @property
    def too_long(self) -> bool:
        return self.full_seconds is not None and self.full_seconds > MOST_WORK

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"too_long": self.too_long}


def works(answers: Iterable[Guessed]) -> list[RoundOverhead]:
    """For each lane with rounds of its own, over all tasks."""
    rounds: dict[str, list[ObservedRound]] = {}
    for answer in answers:
        rounds.setdefault(answer.entrant, []).extend(getattr(answer, "rounds", []))
    return [RoundOverhead.of(entrant, found) for entrant, found in rounds.items() if found]


def _told(spread: Spread | None) -> dict[str, float] | None:
    return spread and spread._asdict()
