"""How long a step takes under each policy, beside a plain one behind a text of the same length.

All lanes stand side by side in one process and take a step each in turn; who begins moves on from round to round.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from playground.bench.caches.caches_defaults import SLOWER
from playground.bench.caches.policy_configs import FULL, Point
from playground.bench.caches.policy_lane import Driven, some_tokens
from playground.bench.results import number, spread
from playground.bench.spread import Spread
from playground.bench.timer import Timer
from playground.decoding.recorder import Recorder
from playground.engine.model import Model
from playground.errors import Refusal

WARM_UP = 4  # rounds that are dropped
AGAIN = f"{FULL}, once more"  # says how far two equal lanes are apart
Tell = Callable[[float, str], None]


@dataclass
class Pace:
    """Seconds of each step under one policy, round by round; `failure` says why there are none."""

    name: str
    seconds: list[float] = field(default_factory=list)
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TimedLanes:
    """Lanes behind one prompt. `recorder` says what is noted of each step: everything, as on the page, or nothing but
    the text.
    """

    model: Model
    prompt: int  # tokens
    rounds: int
    recorder: type[Recorder] = Recorder

    def run(self, points: Sequence[Point], tell: Tell = lambda share, text: None) -> list[Pace]:
        """Every point, with a second plain lane last."""
        paces = {name: Pace(name) for name in (*(point.name for point in points), AGAIN)}
        lanes: list[tuple[Pace, Driven]] = []
        for place, point in enumerate((*points, Point(AGAIN))):
            tell(place / len(paces) / 2, f"reading, {point.name}")
            self._begin(point, paces[point.name], lanes)
        for round in range(WARM_UP + self.rounds):
            tell(0.5 + round / (WARM_UP + self.rounds) / 2, f"round {round}")
            begins = round % len(lanes)
            for pace, lane in [*lanes[begins:], *lanes[:begins]]:
                self._step(pace, lane, round)
        return list(paces.values())

    def _begin(self, point: Point, pace: Pace, lanes: list[tuple[Pace, Driven]]) -> None:
        try:
            driven = Driven(
                point, self.model, some_tokens(self.model, self.prompt), WARM_UP + self.rounds, self.recorder
            )
            driven.read()
        except (Refusal, RuntimeError) as reason:
            pace.failure = str(reason)
        else:
            lanes.append((pace, driven))

    def _step(self, pace: Pace, lane: Driven, round: int) -> None:
        if pace.failure:
            return
        try:
            with Timer(self.model.device) as timer:
                lane.step()
        except RuntimeError as reason:
            pace.failure = str(reason)
        else:
            pace.seconds += [timer.seconds] * (round >= WARM_UP)


@dataclass(frozen=True)
class StepRatio:
    """A policy's steps over plain ones: within each round, and all of them together, which counts what is seldom and
    long.
    """

    name: str
    rounds: Spread
    whole: float

    @classmethod
    def of(cls, pace: Pace, plain: Pace) -> StepRatio:
        pairs = list(zip(pace.seconds, plain.seconds))
        return cls(
            pace.name,
            Spread.of([own / other for own, other in pairs]),
            fmean(own for own, _ in pairs) / fmean(other for _, other in pairs),
        )

    @property
    def holds(self) -> bool:
        return self.rounds.median <= SLOWER


def ratios(paces: Iterable[Pace]) -> list[StepRatio]:
    """Of all that came through but the first, which is the plain one."""
    plain, *others = paces
    return [StepRatio.of(pace, plain) for pace in others if not pace.failure]


def rows(paces: Iterable[Pace]) -> list[list[str]]:
    paces = list(paces)
    told = {ratio.name: ratio for ratio in ratios(paces)}
    return [
        ["policy", "milliseconds", "over plain", "all together", f"at most {SLOWER}"],
        *(_row(pace, told.get(pace.name)) for pace in paces),
    ]


def _row(pace: Pace, ratio: StepRatio | None) -> list[str]:
    if pace.failure:
        return [pace.name, "failed", "-", "-", "no"]
    took = spread(Spread.of([1000 * seconds for seconds in pace.seconds]), 1)
    if ratio is None:
        return [pace.name, took, "-", "-", ""]
    return [pace.name, took, spread(ratio.rounds, 2), number(ratio.whole, 2), "yes" if ratio.holds else "no"]
