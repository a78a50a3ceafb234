"""Asks lanes and the library the same questions, and records the draft tokens and the overhead of each round of a lane.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from playground.bench.speculation.library_baselines import Library
from playground.bench.survey.survey import Answer, Asked, Entrant, Examiner, Stopwatch, prompt_of, rounds
from playground.events import Draft, Forward, Stamped
from playground.lane_fields import LaneConfig
from playground.questions.questions import Question
from playground.trace.result import Result


class ObservedRound(NamedTuple):
    """From one target forward to the next."""

    draft_tokens: int
    overhead: float  # seconds of the lane's clock outside forwards
    other_forwards: int  # of other streams than the target


@dataclass(frozen=True)
class ObservedAnswer(Answer):
    """An answer with its rounds; empty for the library, whose rounds cannot be observed."""

    rounds: list[ObservedRound] = field(default_factory=list)


@dataclass(frozen=True)
class LibraryExaminer(Examiner):
    """Asks lanes as every survey does, and entrants with the names in `theirs` by the library's `generate`."""

    theirs: dict[str, Library] = field(default_factory=dict)

    def entrants(self, lanes: Sequence[Entrant]) -> list[Entrant]:
        """The lanes, followed by the library's entrants."""
        return [*lanes, *(Entrant(name, LaneConfig()) for name in self.theirs)]

    def ask(self, asked: Asked) -> Iterator[Answer | None]:
        if asked.entrant.name in self.theirs:
            return iter([self._generated(asked, self.theirs[asked.entrant.name])])
        return super().ask(asked)

    def _generated(self, asked: Asked, library: Library) -> Answer:
        """The library gets token ids; for our lanes, encoding the prompt is part of the measured time."""
        watch, ids = Stopwatch(), prompt_of(asked.question, self.models).encode(self.models.target)
        with watch:
            watched = library.write(ids)
        return ObservedAnswer(
            asked.entrant.name,
            asked.number,
            asked.question,
            asked.round,
            asked.seed(self.limits.seed),
            token_ids=watched.ids,
            seconds=watch.seconds,
            forwards=watched.forwards,
            trials=watched.trials(),
            reason="end",
        )

    def _read(self, blank: Answer, result: Result) -> Answer:
        return ObservedAnswer(**vars(super()._read(blank, result)), rounds=rounds_of(result.trace.events))


def observe(
    examiner: LibraryExaminer, entrants: Sequence[Entrant], questions: Sequence[Question], repeats: int
) -> Iterator[Answer]:
    """All answers as they are finished; the warm-up is dropped."""
    return (answer for answer in rounds(examiner, entrants, questions, repeats) if answer)


def rounds_of(events: Iterable[Stamped]) -> list[ObservedRound]:
    """The rounds of a lane. All events of one step carry the clock at its end, so that a round's overhead is the clock
    difference minus the seconds of its forwards.
    """
    found: list[ObservedRound] = []
    started, seconds, draft_tokens, others = 0.0, 0.0, 0, 0
    for at, step in groupby(events, key=lambda stamped: stamped.at):
        step_events = [stamped.event for stamped in step]
        forwards = [event for event in step_events if isinstance(event, Forward)]
        seconds += sum(event.seconds for event in forwards)
        others += sum(event.stream != "target" for event in forwards)
        if phases := [event.phase for event in forwards if event.stream == "target"]:
            if "prefill" not in phases:
                found.append(ObservedRound(draft_tokens, max(0.0, at - started - seconds), others))
            started, seconds, draft_tokens, others = at, 0.0, 0, 0
        # drafts of the step of a target forward are for the next one
        draft_tokens += sum(len(event.tokens) for event in step_events if isinstance(event, Draft))
    return found
