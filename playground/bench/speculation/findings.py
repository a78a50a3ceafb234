"""Results: a row per lane and task, ours compared with the library's, and the overhead of a round."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from playground.bench.effects.answer_comparison import answers_of
from playground.bench.speculation.observe import ObservedAnswer, ObservedRound
from playground.bench.speculation.speculative_lanes import AIMS, PLAIN, Pair
from playground.bench.spread import Spread, as_json
from playground.bench.survey.results import ResultRow, table, time_ratio

FULL = (48, 80)  # draft tokens of a full round, which represents rounds of 64
MAX_OVERHEAD = 0.002  # seconds outside forwards that a full round may take


@dataclass(frozen=True)
class LaneResult:
    """One lane on one task. `times` is its speed-up over the plain lane, within each round of the measurement."""

    row: ResultRow
    times: Spread | None

    @property
    def tokens_per_target_forward(self) -> float | None:
        """Tokens after the first per target forward, prefill excluded."""
        return 1 / self.row.target_forwards if self.row.target_forwards else None

    @property
    def same(self) -> bool:
        """Whether there are texts and all of them are the plain lane's."""
        return self.row.same_text == self.row.compared > 0

    @property
    def reaches(self) -> bool:
        """Whether its median speed-up reaches the task's aim, all texts are the plain lane's, and nothing failed."""
        aim = AIMS.get(self.row.task)
        return bool(aim and self.times and self.times.median >= aim and self.same and not self.row.failed)

    def to_json(self) -> dict[str, Any]:
        return self.row.to_json() | {
            "tokens_per_target_forward": self.tokens_per_target_forward,
            "times_as_fast": as_json(self.times),
            "aim": AIMS.get(self.row.task),
            "reaches": self.reaches,
        }


def lane_results(answers: Sequence[ObservedAnswer]) -> list[LaneResult]:
    """Task by task, the plain lane first."""
    return [
        LaneResult(row, time_ratio(answers_of(answers, PLAIN, row.task), answers_of(answers, row.entrant, row.task)))
        for row in table(answers)
    ]


@dataclass(frozen=True)
class LibraryComparison:
    """A lane of ours and the library's counterpart on one task, with equally many draft tokens per round. `times`: the
    speed-up of ours over theirs.
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
            "times_as_fast": as_json(self.times),
            "accepted": dict(zip(sides, self.accepted)),
            "tokens_per_target_forward": dict(zip(sides, self.per_forward)),
            "same_text": self.same_text,
            "compared": self.compared,
            "slower": self.slower,
            "accepts_less": self.accepts_less,
        }


def compare_with_library(answers: Sequence[ObservedAnswer], pairs: Iterable[Pair]) -> list[LibraryComparison]:
    """Pair by pair, task by task."""
    results = {(result.row.entrant, result.row.task): result for result in lane_results(answers)}
    tasks = dict.fromkeys(answer.question.task for answer in answers)
    return [
        _match(answers, pair, task, results[pair.ours, task], results[pair.theirs, task])
        for pair in pairs
        for task in tasks
    ]


def _match(
    answers: Sequence[ObservedAnswer], pair: Pair, task: str, ours: LaneResult, theirs: LaneResult
) -> LibraryComparison:
    our_answers, their_answers = answers_of(answers, pair.ours, task), answers_of(answers, pair.theirs, task)
    texts = {(answer.number, answer.round): answer.token_ids for answer in their_answers}
    same = sum(texts.get((answer.number, answer.round)) == answer.token_ids for answer in our_answers)
    accepted = ours.row.acceptance, theirs.row.acceptance
    per_forward = ours.tokens_per_target_forward, theirs.tokens_per_target_forward
    times = time_ratio(their_answers, our_answers)
    return LibraryComparison(task, pair, times, accepted, per_forward, same, len(our_answers))


@dataclass(frozen=True)
class RoundOverhead:
    """Overhead of a lane's rounds; all but the counts are medians."""

    entrant: str
    rounds: int
    guesses: float  # draft tokens
    passes: float  # forwards of other streams than the target
    seconds: float  # outside forwards
    full: int  # number of full rounds
    full_seconds: float | None  # outside forwards, in a full round; None if there are none

    @classmethod
    def of(cls, entrant: str, rounds: Sequence[ObservedRound]) -> RoundOverhead:
        full = [round.overhead for round in rounds if FULL[0] <= round.draft_tokens <= FULL[1]]
        draft_tokens, overhead, passes = (median(column) for column in zip(*rounds))
        return cls(entrant, len(rounds), draft_tokens, passes, overhead, len(full), median(full) if full else None)

    @property
    def too_long(self) -> bool:
        return self.full_seconds is not None and self.full_seconds > MAX_OVERHEAD

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"too_long": self.too_long}


def round_overheads(answers: Iterable[ObservedAnswer]) -> list[RoundOverhead]:
    """The overhead of each lane whose rounds were observed, over all tasks."""
    rounds: dict[str, list[ObservedRound]] = {}
    for answer in answers:
        rounds.setdefault(answer.entrant, []).extend(getattr(answer, "rounds", []))
    return [RoundOverhead.of(entrant, observed) for entrant, observed in rounds.items() if observed]
