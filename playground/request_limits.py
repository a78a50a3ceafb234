"""Limits on what one request may carry, and the checks that apply them before any work is done.

The same limits apply to the controls of the page, links, stored settings, lessons and the API. `LOCAL` is for a page on
the user's own machine, `PUBLIC` for a page open to others; SECURITY.md lists both. Imports neither torch nor gradio.
"""
from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from playground.errors import Refusal

UNREADABLE = re.compile("[\x00\ud800-\udfff]")
MARK = "\ufeff"  # byte order mark, which some editors and shells write before a text
QUOTED = 60  # characters of a value that an error message repeats
MAX_SEED = 2**53 - 1  # the largest integer that JSON carries exactly to and from a browser
MAX_TOKEN_ID = 2**31 - 1
MAX_NUMBER = 1e18  # largest absolute value of a knob


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one HTTP request and of the texts and lists in it."""

    body_bytes: int  # of a JSON body
    json_depth: int  # nesting of lists and objects
    json_items: int  # list items and object members, in total
    knob_characters: int  # of one knob of a strategy
    lane_characters: int  # of all knobs of all lanes
    own_characters: int  # a visitor's own benchmark questions, as JSON Lines
    kept_bytes: int  # of an earlier run that the browser has kept, uncompressed
    upload_bytes: int = 5_000_000
    number_digits: int = 40
    url_bytes: int = 65_536
    header_bytes: int = 65_536
    body_seconds: int = 30  # until the whole body has arrived
    stop_strings: int = 16
    stop_characters: int = 200  # of one stop string
    name_characters: int = 200  # of a model, a strategy or a knob
    extras: int = 24  # toggles and slot values of one lane
    knobs: int = 48  # of one strategy


LOCAL = RequestLimits(
    body_bytes=8_000_000,
    json_depth=32,
    json_items=100_000,
    knob_characters=100_000,
    lane_characters=400_000,
    own_characters=1_000_000,
    kept_bytes=64_000_000,
)
PUBLIC = RequestLimits(
    body_bytes=2_000_000,
    json_depth=32,
    json_items=20_000,
    knob_characters=10_000,
    lane_characters=40_000,
    own_characters=400_000,
    kept_bytes=8_000_000,
)


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


def is_public() -> bool:
    """Whether this deployment is open to others: with PLAYGROUND_PUBLIC=1, and on a Hugging Face Space."""
    return os.environ.get("PLAYGROUND_PUBLIC", "") not in ("", "0") or "SPACE_ID" in os.environ


def quoted(value: Any) -> str:
    """`value` for an error message: escaped, and truncated to QUOTED characters."""
    if isinstance(value, str):
        return repr(value) if len(value) <= QUOTED else f"{value[:QUOTED]!r}…"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * QUOTED:
        return "a number of more than 60 digits"
    shown = repr(value) if isinstance(value, (int, float, type(None))) else f"a {type(value).__name__}"
    return shown if len(shown) <= QUOTED else f"{shown[:QUOTED]}…"


def without_mark(text: Any) -> Any:
    """A text without a byte order mark before it; anything else as it is."""
    return text.removeprefix(MARK) if isinstance(text, str) else text


def check_text(text: Any, name: str, most: int | None = None, about: str = "") -> None:
    """Raise Refusal unless `text` is a string without NUL or lone surrogates, of at most `most` characters if given."""
    if not isinstance(text, str):
        raise Refusal(f"The {name} must be text, not {quoted(text)}.", about)
    if most is not None and len(text) > most:
        raise Refusal(f"The {name} has {len(text):,} characters; at most {most:,} are allowed: shorten it.", about)
    if UNREADABLE.search(text):
        raise Refusal(f"The {name} contains NUL or half a character (a lone surrogate): remove it.", about)


def check_stops(stops: Iterable[Any]) -> None:
    """Raise Refusal for a stop string that is no text, or empty."""
    for stop in stops:
        check_text(stop, "stop string", about="stop")
        if not stop:
            raise Refusal("A stop string is empty and would match immediately: remove it.", "stop")


def check_stop_strings(stop: str | list[str], limits: RequestLimits) -> None:
    """Raise Refusal for too many stop strings, one per line or in a list, or one that is too long."""
    if isinstance(stop, str):
        check_text(stop, "list of stop strings", limits.stop_strings * (limits.stop_characters + 1), "stop")
    lines = [line for line in stop.splitlines() if line] if isinstance(stop, str) else stop
    if len(lines) > limits.stop_strings:
        raise Refusal(
            f"There are {len(lines)} stop strings; at most {limits.stop_strings} are allowed: remove some.", "stop"
        )
    for line in lines:
        check_text(line, "stop string", limits.stop_characters, "stop")


def check_lanes(lanes: Iterable[Any], length: int, limits: RequestLimits) -> None:
    """Raise Refusal for a lane that is malformed or exceeds a limit. `length`: most tokens a lane may generate."""
    carried = 0
    for number, lane in enumerate(lanes, 1):
        if not isinstance(lane, dict) or not isinstance(lane.get("strategy"), str):
            raise Refusal(f"Lane {number} is malformed: choose its strategy again.", "lanes")
        carried += _check_lane(lane, f"lane {number}", length, limits)
    if carried > limits.lane_characters:
        raise Refusal(
            f"The knobs of all lanes have {carried:,} characters; at most {limits.lane_characters:,} are allowed: "
            "shorten them.",
            "lanes",
        )


def _check_lane(lane: dict[str, Any], place: str, length: int, limits: RequestLimits) -> int:
    """Number of characters in the lane's knobs. Raises Refusal."""
    forced, extras = _list(lane, "forced", place), _list(lane, "extras", place)
    if len(forced) > length:
        raise Refusal(
            f"The text of {place} begins with {len(forced):,} forced tokens, but the run generates at most {length:,}: "
            "raise the number of tokens, or choose the strategy of that lane again.",
            "lanes",
        )
    if not all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in forced):
        raise Refusal(f"The forced tokens of {place} must be token ids, whole numbers of 0 or more.", "lanes")
    if len(extras) > limits.extras:
        raise Refusal(
            f"There are {len(extras):,} extras in {place}; at most {limits.extras} are allowed: remove some.",
            "lanes",
        )
    check_seed(lane.get("seed", 0), f"seed of {place}", "lanes")
    parts = [(lane["strategy"], lane.get("knobs") or {}), *(_extra(extra, place) for extra in extras)]
    return sum(_check_part(name, knobs, place, limits) for name, knobs in parts)


def _list(lane: dict[str, Any], name: str, place: str) -> list[Any]:
    value = lane.get(name) or []
    if not isinstance(value, list):
        raise Refusal(f"The entry {name!r} of {place} must be a list, not {quoted(value)}.", "lanes")
    return value


def _extra(extra: Any, place: str) -> tuple[str, Any]:
    if not isinstance(extra, (list, tuple)) or len(extra) != 2:
        raise Refusal(f"An extra of {place} is malformed: write it as [name, {{knob: value}}].", "lanes")
    return extra[0], extra[1]


def _check_part(name: Any, knobs: Any, place: str, limits: RequestLimits) -> int:
    """Number of characters in one strategy's knobs. Raises Refusal."""
    check_text(name, f"name of a strategy in {place}", limits.name_characters, "lanes")
    if not isinstance(knobs, dict):
        raise Refusal(f"The knobs of {name} in {place} must be an object, not {quoted(knobs)}.", "lanes")
    if len(knobs) > limits.knobs:
        raise Refusal(
            f"{name} in {place} has {len(knobs):,} knobs; at most {limits.knobs} are allowed: remove some.",
            "lanes",
        )
    for knob, value in knobs.items():
        check_text(knob, f"name of a knob of {name}", limits.name_characters, "lanes")
        _check_knob(value, f"knob {knob} of {name} in {place}", limits)
    return sum(len(value) for value in knobs.values() if isinstance(value, str))


def _check_knob(value: Any, name: str, limits: RequestLimits) -> None:
    if isinstance(value, str):
        check_text(value, name, limits.knob_characters, "lanes")
    elif (
        isinstance(value, (int, float)) and not isinstance(value, bool) and not in_range(value, -MAX_NUMBER, MAX_NUMBER)
    ):
        raise Refusal(f"The {name} must be a number between -1e18 and 1e18.", "lanes")


def check_whole(number: Any, name: str, about: str) -> None:
    if type(number) is not int:
        raise Refusal(f"The {name} must be a whole number, not {quoted(number)}.", about)


def check_length(length: Any, most: int | None = None) -> None:
    """Raise Refusal unless this is a number of tokens that a lane may generate, of at most `most` if given."""
    check_whole(length, "number of tokens", "length")
    if length < 1 or most is not None and length > most:
        bounds = f"from 1 to {most}" if most is not None else "at least 1"
        raise Refusal(f"The number of tokens must be {bounds}, not {quoted(length)}.", "length")


def check_seed(seed: Any, name: str = "seed", about: str = "seed") -> None:
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise Refusal(f"The {name} must be a whole number from 0 to {MAX_SEED}, not {quoted(seed)}.", about)


def in_range(value: Any, low: float, high: float) -> bool:
    """Whether `value` is a finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return not (isinstance(value, float) and math.isnan(value)) and low <= value <= high
