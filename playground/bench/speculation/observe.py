"""Asks lanes and the library the same questions, in turn, and notes of each round of a lane what was guessed and what
no forward took.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from playground.bench.questions import Question
from playground.bench.speculation.library_baselines import Library
from playground.bench.survey import Answer, Asked, Entrant, Examiner, Stopwatch, prompt_of, rounds
from playground.contract.lane_config import LaneConfig
from playground.events import Draft, Forward, Stamped
from playground.trace.result import Result


class ObservedRound(NamedTuple):
    """From one pass of the target to the next: guesses that were made, seconds of the lane's clock in which no forward
    ran, and other passes.
    """

    guesses: int
    work: float
    passes: int


@dataclass(frozen=True)
class Guessed(Answer):
    """An answer, and the rounds it took; none of the library, into which nobody sees."""

    rounds: list[ObservedRound] = field(default_factory=list)


@dataclass(frozen=True)
class Beside(Examiner):
    """Examines lanes as every survey does, and those of these names by the library's own way."""

    theirs: dict[str, Library] = field(default_factory=dict)

    def everyone(self, lanes: Sequence[Entrant]) -> list[Entrant]:
        """The lanes, and the library after them."""
        return [*lanes, *(Entrant(name, LaneConfig()) for name in self.theirs)]

    def ask(self, asked: Asked) -> Iterator[Answer | None]:
        if asked.entrant.name in self.theirs:
            return iter([self._generated(asked, self.theirs[asked.entrant.name])])
        return super().ask(asked)

    def _generated(self, asked: Asked, library: Library) -> Answer:
        """It gets its prompt as ids; ours count the encoding of the prompt as their own time."""
        watch, ids = Stopwatch(), prompt_of(asked.question, self.models).encode(self.models.target)
        with watch:
            seen = library.write(ids)
        return Guessed(
            asked.entrant.name,
            asked.number,
            asked.question,
            asked.round,
            asked.seed(self.limits.seed),
            token_ids=seen.ids,
            seconds=watch.seconds,
            forwards=seen.forwards,
            trials=seen.trials(),
            reason="end",
        )

    def _read(self, blank: Answer, result: Result) -> Answer:
        return Guessed(**vars(super()._read(blank, result)), rounds=rounds_of(result.trace.events))


def observe(
    examiner: Beside, everyone: Sequence[Entrant], questions: Sequence[Question], repeats: int
) -> Iterator[Answer]:
    """All answers, as they come; a warm-up is dropped."""
    return (answer for answer in rounds(examiner, everyone, questions, repeats) if answer)


def rounds_of(events: Iterable[Stamped]) -> list[ObservedRound]:
    """All events of one turn of a lane bear the clock of its end, so that a round's work is taken from clock to clock.
    """
    found: list[ObservedRound] = []
    begun, forwards, guesses, others = 0.0, 0.0, 0, 0
    for at, turn in groupby(events, key=lambda stamped: stamped.at):
        told = [stamped.event for stamped in turn]
        passes = [event for event in told if isinstance(event, Forward)]
        forwards += sum(event.seconds for event in passes)
        others += sum(event.stream != "target" for event in passes)
        if phases := [event.phase for event in passes if event.stream == "target"]:
            found += [] if "prefill" in phases else [ObservedRound(guesses, max(0.0, at - begun - forwards), others)]
            begun, forwards, guesses, others = at, 0.0, 0, 0
        # made once the target had answered: for its next pass
        guesses += sum(len(event.tokens) for event in told if isinstance(event, Draft))
    return found
