"""Parses `--set` and `--with` into lane configurations."""
from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from playground.cli.input_files import read_text
from playground.contract import Strategy, discover, find
from playground.contract.lane_config import MAIN_KINDS, check_startable, decoder_for, share
from playground.errors import Refusal
from playground.lane_fields import LaneConfig
from playground.request_limits import quoted

FILE = "file"  # alias of the knob that takes a file's text


def lane_given(name: str, settings: list[str], extras: list[str]) -> LaneConfig:
    """One lane as the command line describes it; raises Refusal."""
    lane = _named(name)
    knobs = lane.knobs | read_knobs(find(lane.strategy), settings)
    return replace(lane, knobs=knobs, extras=[*lane.extras, *map(read_extra, extras)])


def _named(text: str) -> LaneConfig:
    """A lane by the name of its strategy, or as JSON with the fields of a LaneConfig. Raises Refusal."""
    if not text.lstrip().startswith("{"):
        return LaneConfig(find(text).name)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise Refusal(f"The lane {quoted(text)} is not valid JSON: {reason}.", "lanes") from None
    from playground.decoding.program_input import read_lanes  # late, since it imports torch
    return read_lanes([given])[0]


def lanes_given(names: list[str], settings: list[str], extras: list[str]) -> list[LaneConfig]:
    """Lanes to compare. Knobs apply to lanes that have them, drafters and verifiers to lanes with a slot for them,
    toggles to all.

    Raises Refusal for errors that do not depend on the lane; a lane reports what it cannot take itself.
    """
    lanes, added = [_named(name) for name in names], [read_extra(extra) for extra in extras]
    classes = [find(lane.strategy) for lane in lanes]
    given = [read_knobs(cls, [setting for setting in settings if _has(cls, setting)]) for cls in classes]
    for setting in settings:
        if not any(_has(cls, setting) for cls in classes):
            named = ", ".join(lane.strategy for lane in lanes)
            raise Refusal(
                f"None of {named} has a knob {_split(setting)[0]!r}; `python -m playground list NAME` shows the knobs "
                "of one."
            )
    return share([replace(lane, knobs=lane.knobs | knobs) for lane, knobs in zip(lanes, given)], {}, added)


def check_lanes(lanes: list[LaneConfig], context: str) -> set[str]:
    """What the lanes need; raises Refusal for one that cannot work, with a command that does where it is in the wrong
    place.
    """
    try:
        return check_startable(lanes, context)
    except Refusal as refusal:
        if command := next(filter(None, map(_corrected, lanes)), ""):
            raise Refusal(f"{refusal} `{command}` does that.", refusal.about) from None
        raise


def _corrected(lane: LaneConfig) -> str:
    """The command that uses a strategy of the lane in its place; empty if all are in theirs."""
    main = find(lane.strategy)
    if main.kind in ("variant", "study"):
        return f"{main.kind} {main.name}"
    moved = [find(name) for name, _ in lane.extras if find(name).kind in ("drafter", "verifier")]
    if main.kind not in MAIN_KINDS:
        return f"run {decoder_for(main.kind)} --with {main.name}"
    slots = main.slots().values()
    return next((f"run {decoder_for(cls.kind)} --with {cls.name}" for cls in moved if cls.kind not in slots), "")


def read_lane(text: str) -> LaneConfig:
    """Parse `speculative:...+prompt_lookup:depth=10+greedy_match`: a decoder with its knobs and extras; raises Refusal.

    A plus separates only if the name of a strategy follows, so that a pattern may contain one.
    """
    known = "|".join(sorted(discover(), key=len, reverse=True))
    (name, knobs), *extras = map(read_extra, re.split(rf"\+(?=(?:{known})(?:[:+]|$))", text))
    return LaneConfig(name, knobs, extras)


def read_extra(text: str) -> tuple[str, dict[str, Any]]:
    """Parse `regex:pattern=[0-9]{1,3}` into name and knobs. A comma separates only if a known `knob=` follows."""
    name, _, rest = text.partition(":")
    cls = find(name)
    known = "|".join([*(knob.name for knob in cls.knobs()), FILE])
    settings = re.split(rf",(?=(?:{known})=)", rest) if rest else []
    return name, read_knobs(cls, [part for setting in settings for part in _parts(cls, setting)])


def _parts(cls: type[Strategy], setting: str) -> list[str]:
    """A setting, divided at each `,word=` unless its value is a text: no number has one, so the word is misspelt."""
    texts = {knob.name for knob in cls.knobs() if knob.type is str} | {FILE}
    return [setting] if _split(setting)[0] in texts else re.split(r",(?=\w+=)", setting)


def read_knobs(cls: type[Strategy], settings: list[str]) -> dict[str, Any]:
    """Parse `knob=value` pairs, with values as text; raises Refusal for other forms and for a knob that is set twice.
    """
    knobs: dict[str, Any] = {}
    for name, value in map(_split, settings):
        if name == FILE and (target := _file_knob(cls)):
            name, value = target, read_text(value)
        if name in knobs:
            raise Refusal(f"{cls.name}: {name} is set twice; remove one.", name)
        knobs[name] = value
    return knobs


def _split(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not equals:
        raise Refusal(f"{setting!r} is not a setting: write knob=value.")
    return name.strip(), value


def _has(cls: type[Strategy], setting: str) -> bool:
    name = _split(setting)[0]
    return name in {knob.name for knob in cls.knobs()} or (name == FILE and _file_knob(cls) is not None)


def _file_knob(cls: type[Strategy]) -> str | None:
    return next((knob.name for knob in cls.knobs() if knob.file), None)
