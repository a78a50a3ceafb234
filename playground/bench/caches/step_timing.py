"""Time of a decode step under each policy, compared with a plain step after a text of the same length.

All lanes run in one process and take one step each per round; the order rotates from round to round.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from playground.bench.caches.caches_defaults import SLOWER
from playground.bench.caches.policy_configs import FULL, Point
from playground.bench.caches.policy_lane import PolicyLane, some_tokens
from playground.bench.report_text import Rows, number, spread_text
from playground.bench.speed.timer import Timer
from playground.bench.spread import Spread
from playground.decoding.recorder import Recorder
from playground.engine.model import Model
from playground.errors import Refusal

WARM_UP = 4  # rounds that are dropped
AGAIN = f"{FULL}, once more"  # shows how much two equal lanes differ
ProgressCallback = Callable[[float, str], None]


@dataclass
class StepTimes:
    """Seconds of each step under one policy, round by round; `failure` says why they end early."""

    name: str
    seconds: list[float] = field(default_factory=list)
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TimedLanes:
    """Lanes after one prompt. `recorder` records every event, as on the page, or only the text."""

    model: Model
    prompt: int  # tokens
    rounds: int
    recorder: type[Recorder] = Recorder

    def run(
        self, points: Sequence[Point], progress: ProgressCallback = lambda share, text: None
    ) -> list[StepTimes]:
        """Every point, with a second plain lane last."""
        times = {name: StepTimes(name) for name in (*(point.name for point in points), AGAIN)}
        lanes: list[tuple[StepTimes, PolicyLane]] = []
        for index, point in enumerate((*points, Point(AGAIN))):
            progress(index / len(times) / 2, f"prefill, {point.name}")
            self._begin(point, times[point.name], lanes)
        for round in range(WARM_UP + self.rounds):
            progress(0.5 + round / (WARM_UP + self.rounds) / 2, f"round {round}")
            first = round % len(lanes)
            for own, lane in [*lanes[first:], *lanes[:first]]:
                self._step(own, lane, round)
        return list(times.values())

    def _begin(self, point: Point, times: StepTimes, lanes: list[tuple[StepTimes, PolicyLane]]) -> None:
        prompt = some_tokens(self.model, self.prompt)
        try:
            lane = PolicyLane(point, self.model, prompt, WARM_UP + self.rounds, self.recorder)
            lane.prefill()
        except (Refusal, RuntimeError) as reason:
            times.failure = str(reason)
        else:
            lanes.append((times, lane))

    def _step(self, times: StepTimes, lane: PolicyLane, round: int) -> None:
        if times.failure:
            return
        try:
            with Timer(self.model.device) as timer:
                lane.step()
        except RuntimeError as reason:
            times.failure = str(reason)
        else:
            times.seconds += [timer.seconds] * (round >= WARM_UP)


@dataclass(frozen=True)
class StepRatio:
    """Time of a policy's steps / plain steps: within each round, and in total, which includes rare but long steps."""

    name: str
    rounds: Spread
    whole: float

    @classmethod
    def of(cls, times: StepTimes, plain: StepTimes) -> StepRatio:
        pairs = list(zip(times.seconds, plain.seconds))
        return cls(
            times.name,
            Spread.of([own / other for own, other in pairs]),
            fmean(own for own, _ in pairs) / fmean(other for _, other in pairs),
        )

    @property
    def holds(self) -> bool:
        return self.rounds.median <= SLOWER


def ratios(results: Iterable[StepTimes]) -> list[StepRatio]:
    """Of all that did not fail, compared with the first, which is the plain lane."""
    plain, *others = results
    return [StepRatio.of(times, plain) for times in others if not times.failure]


def rows(results: Iterable[StepTimes]) -> Rows:
    """A table, a row per policy."""
    results = list(results)
    by_name = {ratio.name: ratio for ratio in ratios(results)}
    return [
        ["policy", "milliseconds", "over plain", "all together", f"at most {SLOWER}"],
        *(_row(times, by_name.get(times.name)) for times in results),
    ]


def _row(times: StepTimes, ratio: StepRatio | None) -> list[str]:
    if times.failure:
        return [times.name, "failed", "-", "-", "no"]
    took = spread_text(Spread.of([1000 * seconds for seconds in times.seconds]), 1)
    if ratio is None:
        return [times.name, took, "-", "-", ""]
    return [times.name, took, spread_text(ratio.rounds, 2), number(ratio.whole, 2), "yes" if ratio.holds else "no"]
