"""The settings of the page: a run's request as its controls hold it, and what the page does with it.

Controls and browser storage are untrusted: clients can send any JSON.
"""
from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar

from playground.contract import find
from playground.contract.lane_config import program_runners
from playground.errors import Refusal
from playground.lane_fields import LaneConfig, untrusted_lane
from playground.questions.questions import Question, known
from playground.request_limits import Rules, quoted
from playground.run_request import LANES, RunRequest, untrusted_turns
from playground.weight_changes import are_weights

WIDEST = 8  # maximum number of lanes on any page
MOST_WRITTEN = 32_768  # tokens of all runs of a repeated lane: their events are kept until all have ended


@dataclass(frozen=True)
class LaneCopy:
    """A copy of lane `parent` with one change, which is run beside the lanes of a run."""

    word: ClassVar[str]
    parent: int
    instead_of: int | None = field(default=None, kw_only=True)  # the lane that it replaces

    def changed(self, lane: dict[str, Any], length: int) -> dict[str, Any]:
        """The settings of the copy of a lane with these, whose text has at most `length` tokens. Raises Refusal."""
        raise NotImplementedError

    def siblings(self, count: int) -> tuple[int, ...]:
        """The lanes that stay, of `count`."""
        return tuple(lane for lane in range(count) if lane != self.instead_of)

    @property
    def place(self) -> int:
        """Its number: after its parent, or in the place of its parent."""
        before = self.instead_of is not None and self.instead_of <= self.parent
        return self.parent + 1 - before


@dataclass(frozen=True)
class Fork(LaneCopy):
    """The text begins with `tokens`, changed from `position` on."""

    word = "fork"
    tokens: list[int]
    position: int

    def changed(self, lane, length):
        return {**lane, "forced": self.tokens[:length], "forked_at": self.position}


@dataclass(frozen=True)
class SwitchedCopy(LaneCopy):
    """A part of the model is off. Overlays, for which the whole model reads the text, are left out."""

    word = "copy"
    part: str  # as `switch_part` reads it

    def changed(self, lane, length):
        switch = find("switch_part")(parts=self.part)
        switch.check()
        kept = [pair for pair in lane.get("extras", []) if find(pair[0]).kind != "overlay"]
        return {**lane, "extras": [*kept, [switch.name, {"parts": self.part}]]}


@dataclass
class Settings(RunRequest):
    """A request as the controls of the page hold it, one field for each, in their order."""

    def __post_init__(self) -> None:
        """Replace texts and lists of a wrong type by their defaults, since clients can send any JSON.

        Numbers are left to `check`.
        """
        for control in fields(self):
            default = control.default if control.default is not MISSING else control.default_factory()
            value = getattr(self, control.name)
            listed = control.name == "stop" and isinstance(value, list)  # of a program
            if isinstance(default, (str, list)) and not isinstance(value, type(default)) and not listed:
                setattr(self, control.name, default)
        self.before = untrusted_turns(self.before)

    def configs(self) -> list[LaneConfig]:
        return [LaneConfig.of(lane) for lane in map(untrusted_lane, self.lanes) if lane]

    def own_weights(self) -> list[str]:
        """Weights of the target that single lanes ask for; those that there are not are left to their lanes to refuse.
        """
        return list(dict.fromkeys(config.weights for config in self.configs() if are_weights(config.weights)))

    def with_copy(self, copy: LaneCopy) -> Settings:
        """The same with a copy of a lane beside it, and without the lane that it replaces. Raises Refusal beyond LANES
        lanes.
        """
        if len(self.lanes) >= LANES and copy.instead_of is None:
            raise Refusal(f"There are {LANES} lanes already: choose which of them the {copy.word} replaces.", "lanes")
        lanes = [self.lanes[lane] for lane in copy.siblings(len(self.lanes))]
        changed = copy.changed(self.lanes[copy.parent], self.length)
        return replace(self, lanes=[*lanes[:copy.place], changed, *lanes[copy.place:]])

    def repeated(self, lane: int, times: int, rules: Rules) -> Settings:
        """The same with `times` copies of one lane, with consecutive seeds. Raises Refusal beyond the limits."""
        if type(lane) is not int or not 0 <= lane < len(self.lanes):
            raise Refusal(f"There is no lane {_counted(lane)} to repeat: choose one of the lanes above.", "repeats")
        if type(times) is not int or not 2 <= times <= rules.repeats:
            raise Refusal(f"The number of runs must be from 2 to {rules.repeats}: change it.", "repeats")
        if times * self.length > MOST_WRITTEN:
            raise Refusal(
                f"{times} runs of {self.length} tokens exceed the limit of {MOST_WRITTEN:,} tokens: choose fewer runs "
                "or tokens.",
                "repeats",
            )
        first = self.lanes[lane].get("seed", self.seed)
        return replace(self, lanes=[{**self.lanes[lane], "seed": seed} for seed in range(first, first + times)])

    def written(self) -> int:
        """Maximum number of tokens of all lanes together."""
        return len(self.lanes) * self.length

    def known(self) -> Question | None:
        """The question with a known answer that is asked here; None for any other prompt, or if not asked as a chat."""
        context = self.context if self.context.strip() else ""
        return known(self.prompt, self.turns(), context) if self.chat else None

    def check(self, rules: Rules) -> None:
        """Raise Refusal for anything that can be checked without a model."""
        super().check(rules)
        running = [] if rules.programs else [name for config in self.configs() for name in program_runners(config)]
        if running:
            raise Refusal(
                f"{running[0]} runs programs written by a model, and this page does not: choose another strategy.",
                "lanes",
            )


def _counted(lane: Any) -> str:
    """A lane's number, counted from 1."""
    return str(lane + 1) if type(lane) is int else quoted(lane)
