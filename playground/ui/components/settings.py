"""The settings of a run: read from the controls, the browser's storage or a link, and checked before a run.

Links and browser storage are untrusted, so `Settings.read` accepts only known fields of the expected types.
"""
from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

from playground.contract.lane_config import WEIGHTS, LaneConfig
from playground.decoding.prompt_form import check_form, check_tools
from playground.engine.checkpoint.weight_changes import check_weights
from playground.errors import Refusal
from playground.questions.questions import Question, known
from playground.request_limits import (
    LOCAL,
    PUBLIC,
    RequestLimits,
    check_lanes,
    check_seed,
    check_stop_strings,
    check_text,
    quoted,
)

LANES = 4
WIDEST = 8  # maximum number of lanes on any page
DEFAULT = "default"  # the model or draft the page was started with
NO_DRAFT = "none"
CHOICES = {
    "mode": ("raw", "chat"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": ("none", *WEIGHTS),
}
TURNS = 32  # earlier turns of a chat
MOST_WRITTEN = 32_768  # tokens of all runs of a repeated lane: their events are kept until all have ended
NUMBERS = {"seed": "seed", "length": "number of tokens"}


@dataclass(frozen=True)
class Rules:
    """What this deployment allows. A public one opens no local paths, limits runs, and by default runs no programs
    written by a model.
    """

    public: bool = False
    characters: int = 100_000
    tokens: int = 4096
    repeats: int = 32  # runs of one lane
    answers: int = 4000  # of one survey: strategies times questions times rounds
    programs: bool = True  # whether programs written by a model may be run

    @property
    def limits(self) -> RequestLimits:
        """What one request may carry to this deployment."""
        return PUBLIC if self.public else LOCAL

    @classmethod
    def for_visitors(cls, programs: bool = False) -> Rules:
        return cls(public=True, characters=4000, tokens=256, repeats=8, answers=96, programs=programs)


@dataclass(frozen=True)
class Fork:
    """A copy of lane `parent` whose text begins with `tokens`, changed from `position` on."""

    parent: int
    tokens: list[int]
    position: int
    instead_of: int | None = None  # the lane that it replaces

    def siblings(self, count: int) -> tuple[int, ...]:
        """The lanes that stay, of `count`."""
        return tuple(lane for lane in range(count) if lane != self.instead_of)

    @property
    def place(self) -> int:
        """Its number: after its parent, or in the place of its parent."""
        before = self.instead_of is not None and self.instead_of <= self.parent
        return self.parent + 1 - before


@dataclass
class Settings:
    """Everything a run depends on: plain data, one field for each control of the page, in its order."""

    MOST: ClassVar[int] = LANES
    prompt: str = ""
    mode: str = "raw"
    system: str = ""
    context: str = ""
    seed: int = 0
    length: int = 96
    stop: str = ""
    model: str = DEFAULT
    draft: str = DEFAULT
    dtype: str = "auto"
    quantization: str = "none"
    lanes: list[dict[str, Any]] = field(default_factory=lambda: [{"strategy": "greedy"}])
    before: list[list[str]] = field(default_factory=list)  # earlier turns of a chat: [user, assistant]
    form: str = ""  # how context and prompt become one text
    tools: str = ""  # of a chat, a list in JSON

    def __post_init__(self) -> None:
        """Replace texts and lists of a wrong type by their defaults, since clients can send any JSON.

        Numbers are left to `check`.
        """
        for control in fields(self):
            default = control.default if control.default is not MISSING else control.default_factory()
            if isinstance(default, (str, list)) and not isinstance(getattr(self, control.name), type(default)):
                setattr(self, control.name, default)

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    @classmethod
    def read(cls, raw: Any) -> Settings:
        """Settings from untrusted data; invalid fields keep their defaults."""
        blank = cls()
        given = raw.items() if isinstance(raw, dict) else ()
        known = {
            name: value
            for name, value in given
            if _fits(value, getattr(blank, name, None)) and value in CHOICES.get(name, (value,))
        }
        if "lanes" in known:
            known["lanes"] = [lane for lane in map(_lane, known["lanes"]) if lane][:cls.MOST]
        if "before" in known:
            known["before"] = _turns(known["before"])
        return cls(**known)

    @classmethod
    def from_code(cls, code: str) -> Settings | None:
        """The settings in a link's code; None if it is malformed."""
        try:
            padded = code.encode() + b"=" * (-len(code) % 4)
            return cls.read(json.loads(base64.urlsafe_b64decode(padded)))
        except (ValueError, binascii.Error, RecursionError):
            return None

    def to_code(self) -> str:
        """A short code for a link: compact JSON without defaults, in base64."""
        blank = asdict(type(self)())
        changed = {name: value for name, value in asdict(self).items() if value != blank[name]}
        text = json.dumps(changed, separators=(",", ":"), ensure_ascii=False)
        return base64.urlsafe_b64encode(text.encode(errors="surrogatepass")).decode().rstrip("=")

    def configs(self) -> list[LaneConfig]:
        return [_config(lane) for lane in map(_lane, self.lanes) if lane]

    def own_weights(self) -> list[str]:
        """Quantisations of the target that single lanes ask for."""
        return list(dict.fromkeys(config.weights for config in self.configs() if config.weights))

    def forked(self, fork: Fork) -> Settings:
        """The same with the fork beside its parent, and without the lane that it replaces. Raises Refusal beyond LANES
        lanes.
        """
        if len(self.lanes) >= LANES and fork.instead_of is None:
            raise Refusal(f"There are {LANES} lanes already: choose which of them the fork replaces.", "lanes")
        copy = {**self.lanes[fork.parent], "forced": fork.tokens[:self.length], "forked_at": fork.position}
        lanes = [self.lanes[lane] for lane in fork.siblings(len(self.lanes))]
        return replace(self, lanes=[*lanes[:fork.place], copy, *lanes[fork.place:]])

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

    def stops(self) -> tuple[str, ...]:
        """Stop strings, one per line; a line break is written \\n."""
        return tuple(line.replace("\\n", "\n") for line in self.stop.splitlines() if line)

    def turns(self) -> tuple[tuple[str, str], ...]:
        """The earlier turns as pairs (user, assistant)."""
        return tuple((asked, answered) for asked, answered in _turns(self.before))

    def known(self) -> Question | None:
        """The question with a known answer that is asked here; None for any other prompt, or if not asked as a chat."""
        context = self.context if self.context.strip() else ""
        return known(self.prompt, self.turns(), context) if self.mode == "chat" else None

    def check(self, rules: Rules) -> None:
        """Raise Refusal for anything that can be checked without a model."""
        self.check_tools(rules)
        self._check_size(rules)
        check_form(self.form)
        if not self.prompt.strip():
            raise Refusal("The prompt is empty: write a few words, or choose an example.", "prompt")
        if self.turns() and self.mode != "chat":
            raise Refusal("Earlier turns require a chat: choose Chat, or remove the turns.", "before")
        if not self.lanes:
            raise Refusal("There is no lane to run: add one.", "lanes")
        check_lanes(self.lanes, self.length, rules.limits)
        if running := [name for config in self.configs() for name in config.running()] if not rules.programs else []:
            raise Refusal(
                f"{running[0]} runs programs written by a model, and this page does not: choose another strategy.",
                "lanes",
            )

    def check_tools(self, rules: Rules) -> None:
        """Raise Refusal for tools that no model can use here."""
        check_text(self.tools, "list of tools", rules.characters, "tools")
        check_tools(self.tools.strip(), self.mode == "chat")

    def _check_size(self, rules: Rules) -> None:
        """Raise Refusal for texts and numbers beyond the limits, before anything is computed from them."""
        self._check_numbers(rules)
        turns = [text for turn in self.turns() for text in turn]
        whole = [self.prompt, self.system, self.context, self.form, self.tools, *turns]
        if sum(map(len, whole)) > rules.characters:
            more = len(self.prompt) < sum(map(len, whole))
            named = "prompt, system message, tools, context and earlier turns together have" if more else "prompt has"
            raise Refusal(f"The {named} more than {rules.characters:,} characters: shorten the text.", "prompt")
        for text in whole:
            check_text(text, "prompt, system message, context or an earlier turn", rules.characters, "prompt")
        for name in ("model", "draft", "dtype", "quantization", "mode"):
            check_text(getattr(self, name), f"choice of {name}", rules.limits.name_characters, name)
        check_stop_strings(self.stop, rules.limits)

    def _check_numbers(self, rules: Rules) -> None:
        for name, label in NUMBERS.items():
            if type(getattr(self, name)) is not int:
                raise Refusal(f"The {label} must be a whole number.", name)
        if not 1 <= self.length <= rules.tokens:
            raise Refusal(
                f"The number of tokens must be from 1 to {rules.tokens}, not {quoted(self.length)}.", "length"
            )
        check_seed(self.seed)


def _counted(lane: Any) -> str:
    """A lane's number, counted from 1."""
    return str(lane + 1) if type(lane) is int else quoted(lane)


def _fits(value: Any, default: Any) -> bool:
    return default is not None and type(value) is type(default)


def _lane(raw: Any) -> dict[str, Any] | None:
    """One lane as the fields of a LaneConfig, without seed, fork and weights that keep their defaults.

    None if it is malformed.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("strategy"), str):
        return None
    lane = {name: read(raw.get(name)) for name, read in LANE_FIELDS.items()}
    if lane["forked_at"] is not None and lane["forked_at"] >= len(lane["forced"]):
        lane["forked_at"] = None
    return {name: value for name, value in lane.items() if value is not None}


def _config(lane: dict[str, Any]) -> LaneConfig:
    """A lane as `_lane` returns it, as a configuration that shares nothing with it."""
    return LaneConfig(**deepcopy(lane) | {"extras": [(name, dict(knobs)) for name, knobs in lane["extras"]]})


def _extras(raw: Any) -> list[list[Any]]:
    pairs = raw if isinstance(raw, list) else []
    return [[pair[0], _scalars(pair[1])] for pair in pairs if _is_extra(pair)]


def _tokens(raw: Any) -> list[int]:
    return [token for token in raw if type(token) is int] if isinstance(raw, list) else []


def _natural(raw: Any) -> int | None:
    return raw if type(raw) is int and raw >= 0 else None


def _weights(raw: Any) -> str | None:
    try:
        check_weights(raw)
    except Refusal:
        return None
    return raw or None


def _is_extra(pair: Any) -> bool:
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], dict)


def _turns(raw: Any) -> list[list[str]]:
    """Pairs of texts; anything else is left out."""
    pairs = raw if isinstance(raw, (list, tuple)) else []
    return [
        [*pair]
        for pair in pairs
        if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
    ][:TURNS]


def _scalars(knobs: Any) -> dict[str, Any]:
    """Knobs a page may set: scalars, except `file`, which reads from the disk."""
    if not isinstance(knobs, dict):
        return {}
    return {str(k): v for k, v in knobs.items() if k != "file" and isinstance(v, (str, int, float, bool))}


# how each field of a lane is read from untrusted data; None keeps its default
LANE_FIELDS: dict[str, Callable[[Any], Any]] = {
    "strategy": lambda raw: raw,
    "knobs": _scalars,
    "extras": _extras,
    "forced": _tokens,
    "seed": _natural,
    "forked_at": _natural,
    "weights": _weights,
}
