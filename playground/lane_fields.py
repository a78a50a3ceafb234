"""The fields of a lane, and how each is read from untrusted data. Imports neither torch nor gradio."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from playground.errors import Refusal
from playground.request_limits import QUOTED, quoted
from playground.weight_changes import LONGEST

EXAMPLE = '{"strategy": "greedy", "knobs": {}, "extras": [["top_p", {"p": 0.9}]], "seed": 3}'
BLANK: dict[str, Any] = {"knobs": {}, "extras": [], "forced": []}  # what an untrusted lane always has
Reader = Callable[[Any], Any]


def _scalars(knobs: Any) -> dict[str, Any]:
    """Knobs that someone else may set: scalars, except `file`, which reads from the disk."""
    if not isinstance(knobs, dict):
        return {}
    return {str(k): v for k, v in knobs.items() if k != "file" and isinstance(v, (str, int, float, bool))}


def _extras(raw: Any) -> list[list[Any]]:
    pairs = raw if isinstance(raw, list) else []
    return [[pair[0], _scalars(pair[1])] for pair in pairs if _is_extra(pair)]


def _is_extra(pair: Any) -> bool:
    return isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], dict)


def _tokens(raw: Any) -> list[int]:
    return [token for token in raw if type(token) is int] if isinstance(raw, list) else []


def _natural(raw: Any) -> int | None:
    return raw if type(raw) is int and raw >= 0 else None


def _weights(raw: Any) -> str | None:
    """A text of bounded length; one that names no weights is refused when the lane is checked, not left out."""
    return raw[:LONGEST + 1] if isinstance(raw, str) and raw not in ("", "none") else None


def _from(reader: Reader) -> dict[str, Reader]:
    """How a field is read from untrusted data; None stands for its default."""
    return {"untrusted": reader}


@dataclass
class LaneConfig:
    """The configuration of one lane. It is plain data, so that a page, a shell command or a link can carry it."""

    strategy: str = field(default="greedy", metadata=_from(lambda raw: raw if isinstance(raw, str) else None))
    knobs: dict[str, Any] = field(default_factory=dict, metadata=_from(_scalars))
    # slots and toggles, [("top_p", {"p": 0.9}), ("prompt_lookup", {})]
    extras: list[tuple[str, dict[str, Any]]] = field(default_factory=list, metadata=_from(_extras))
    # tokens the generated text begins with, as in a fork of a run
    forced: list[int] = field(default_factory=list, metadata=_from(_tokens))
    # None: the seed of the run, so that lanes share their uniform numbers
    seed: int | None = field(default=None, metadata=_from(_natural))
    # index in `forced` of the first token that a fork changed; -1 for none, or unknown
    forked_at: int = field(default=-1, metadata=_from(_natural))
    # of the target in this lane alone, such as "int8" or "adapter:FOLDER", as in `WeightChanges`; empty: as in the run
    weights: str = field(default="", metadata=_from(_weights))

    @classmethod
    def of(cls, lane: dict[str, Any]) -> LaneConfig:
        """A configuration that shares nothing with the JSON data it is made of."""
        own = deepcopy(lane)
        return cls(**own | {"extras": [(name, dict(knobs)) for name, knobs in own.get("extras", ())]})

    @classmethod
    def check_fields(cls, given: Iterable[Any]) -> None:
        """Raise Refusal, with the nearest field, for a name that is no field of a lane, and without a strategy."""
        known, given = [each.name for each in fields(cls)], list(given)
        for name in (name for name in given if name not in known):
            near = get_close_matches(str(name)[:QUOTED], known, 1)
            hint = f"did you mean {near[0]}?" if near else f"its fields are {', '.join(known)}."
            raise Refusal(f"A lane has no field {quoted(name)}; {hint}", "lanes")
        if "strategy" not in given:
            raise Refusal(f"A lane given as a dict names its strategy; its fields are {', '.join(known)}.", "lanes")

    def check_fork(self) -> None:
        """Raise Refusal for a fork that changed no token of the given ones."""
        if type(self.forked_at) is not int or not -1 <= self.forked_at < max(1, len(self.forced)):
            raise Refusal(
                "forked_at is the index in `forced` of the first token that was changed, or -1, not "
                f"{quoted(self.forked_at)}.",
                "forked_at",
            )


def untrusted_lane(raw: Any) -> dict[str, Any] | None:
    """What of a lane can be used, without seed, fork and weights that keep their defaults; None without a strategy."""
    if not isinstance(raw, dict) or not isinstance(raw.get("strategy"), str):
        return None
    lane = {each.name: each.metadata["untrusted"](raw.get(each.name)) for each in fields(LaneConfig)}
    if lane["forked_at"] is not None and lane["forked_at"] >= len(lane["forced"]):
        lane["forked_at"] = None
    return {name: value for name, value in lane.items() if value is not None}


def check_lane_list(lanes: Any, most: int) -> None:
    """Raise Refusal unless these are lanes as JSON data, of which nothing is left out when they are read."""
    if not isinstance(lanes, list) or len(lanes) > most:
        raise Refusal(f"The lanes must be a list of one to {most}.", "lanes")
    for number, lane in enumerate(lanes, 1):
        try:
            LaneConfig.check_fields(lane if isinstance(lane, dict) else ())
        except Refusal as refusal:
            raise Refusal(f"Lane {number} is malformed. {refusal}", "lanes") from None
        if untrusted_lane(lane) != BLANK | lane:
            raise Refusal(f"Lane {number} is malformed: write it as {EXAMPLE}; only the strategy is required.", "lanes")


def check_some_lane(lanes: Iterable[Any]) -> None:
    if not any(True for _ in lanes):
        raise Refusal("There is no lane to run: add one.", "lanes")
