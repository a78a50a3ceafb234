"""A trace: the header of each lane and all events in order. Page, metrics, lessons and tests read nothing else.

On disk it is JSON Lines. The first line is {"format": "decoding-playground-trace", "version": 1, "lanes": [header,
...]}, every other line is one stamped event. Fields with their default value are omitted. `schema()` describes both
kinds of line. A trace that can be read may still be inconsistent: `check` reports that. Imports neither torch nor
gradio.
"""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from playground.errors import Refusal
from playground.events import EVENTS, VERSION, Header, Stamped, event_from_json, header_from_json

FORMAT = "decoding-playground-trace"


@dataclass
class Trace:
    """Headers, one per lane, and stamped events with increasing `seq`. `lane(i)` keeps the number of the lane."""

    headers: list[Header]
    events: list[Stamped] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = {header.lane for header in self.headers}
        if len(self._numbers) < len(self.headers):
            raise ValueError("two lanes have the same number")
        given, self.events = self.events, []
        self.extend(given)

    def append(self, stamped: Stamped) -> None:
        """Add an event. Raises ValueError for a lane without a header and for a `seq` that does not increase."""
        if stamped.lane not in self._numbers:
            raise ValueError(f"there is no lane {stamped.lane}")
        if self.events and stamped.seq <= self.events[-1].seq:
            raise ValueError(f"seq {stamped.seq} follows seq {self.events[-1].seq}; it must increase")
        self.events.append(stamped)

    def extend(self, given: Iterable[Stamped]) -> None:
        """Add events, each as `append` does."""
        for stamped in given:
            self.append(stamped)

    def lane(self, i: int) -> Trace:
        """The trace of lane number i alone. Raises KeyError if there is no such lane."""
        headers = [header for header in self.headers if header.lane == i]
        if not headers:
            raise KeyError(i)
        return Trace(headers, [stamped for stamped in self.events if stamped.lane == i])

    def save(self, path: str | Path) -> None:
        """Write the whole file. Raises Refusal if it cannot be written or a number is not finite."""
        try:
            lines = [_dump(self._head()), *(_dump(stamped.to_json()) for stamped in self.events)]
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise Refusal(f"The trace cannot be saved to {path}: {_reason(error)}.", "path") from error

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file. Raises Refusal with the line and the reason."""
        return _read(_lines(Path(path)))

    def to_json(self) -> dict[str, Any]:
        """The whole trace as one plain dict: the first line of a file, with the others under "events"."""
        return {**self._head(), "events": [stamped.to_json() for stamped in self.events]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Trace:
        """The inverse of `to_json`. Raises Refusal with the event and the reason."""
        return _read(_entries(document))

    def _head(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "lanes": [asdict(header) for header in self.headers]}


def replay(trace: Trace, speed: float = 1.0) -> Iterator[tuple[float, Stamped]]:
    """Events as if all lanes had started at the same time, each with the seconds to wait before it.

    Lanes share a machine but each has its own clock. Events are ordered by these clocks, not by `seq`, so a fast lane
    ends first. The order within a lane is preserved. `speed` 2 halves the waits. Raises Refusal unless it is above 0.
    """
    if not speed > 0:
        raise Refusal(f"The speed must be above 0, not {speed}.", "speed")
    return _with_waits(sorted(trace.events, key=lambda stamped: (stamped.at, stamped.seq)), speed)


def _with_waits(events: list[Stamped], speed: float) -> Iterator[tuple[float, Stamped]]:
    before = 0.0
    for stamped in events:
        yield (stamped.at - before) / speed, stamped
        before = stamped.at


# Reading: entries are pairs of a location, for error messages, and the parsed JSON.

def _read(entries: Iterator[tuple[str, Any]]) -> Trace:
    location, head = next(entries)
    with _refusing(location):
        trace = Trace(_headers(head))
    for location, entry in entries:
        with _refusing(location):
            trace.append(_stamped(entry))
    return trace


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        lines = path.read_bytes().splitlines(keepends=True) or [b""]
    except OSError as error:
        raise Refusal(f"{path} cannot be opened: {_reason(error)}.", "path") from error
    for number, line in enumerate(lines, 1):
        location = f"Line {number} of {path.name}"
        with _refusing(location):
            entry = _parse(line)
        yield location, entry


def _entries(document: Any) -> Iterator[tuple[str, Any]]:
    yield "The trace", document
    for number, entry in enumerate(document.get("events", [])):
        yield f"Event {number} of the trace", entry


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_no_constant, object_pairs_hook=_object)
    except KeyTwice:
        raise
    except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
        raise ValueError("it is not JSON" if line.endswith(b"\n") else "it is truncated") from None


class KeyTwice(ValueError):
    """An object has two values for one key, and parsers differ in which of them they use."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise KeyTwice(f"it has the key {twice!r} twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _headers(head: Any) -> list[Header]:
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError("it is not the header of a decoding playground trace")
    version = head.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"{version!r} is not a version of the format")
    if version > VERSION:
        raise ValueError(f"its format version is {version}, and this playground reads versions up to {VERSION}")
    if not isinstance(head.get("lanes"), list) or not isinstance(head.get("events", []), list):
        raise ValueError("its lanes or events are not a list")
    return [_header(lane) for lane in head["lanes"]]


def _header(lane: Any) -> Header:
    if not isinstance(lane, dict):
        raise ValueError("a header is not a JSON object")
    _refuse_unknown(Header, lane.keys())
    return header_from_json(lane)


@dataclass
class _Stamp:
    lane: NonNegativeInt
    seq: NonNegativeInt
    at: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # seconds


_STAMP = TypeAdapter(_Stamp)


def _stamped(entry: Any) -> Stamped:
    if not isinstance(entry, dict):
        raise ValueError("it is not a JSON object")
    stamp = _STAMP.validate_python(entry)
    facts = {name: value for name, value in entry.items() if name not in ("lane", "seq", "at")}
    event = event_from_json(facts)
    _refuse_unknown(type(event), facts.keys() - {"kind"})
    return Stamped(stamp.lane, stamp.seq, stamp.at, event)


def _refuse_unknown(cls: type, names: Iterable[str]) -> None:
    """Raise ValueError for an unknown field; a misspelt one would otherwise read as its default value."""
    unknown = sorted(set(names) - {f.name for f in fields(cls)})
    if unknown:
        raise ValueError(f"{getattr(cls, 'kind', 'a header')} has no field {unknown[0]!r}")


@contextmanager
def _refusing(location: str) -> Iterator[None]:
    """Turn errors of the block into a Refusal that names the location."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Refusal(f"{location} cannot be read: {_reason(error)}.", "path") from error


def _reason(error: Exception) -> str:
    """The error as part of a sentence."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return (getattr(error, "strerror", None) or str(error)).rstrip(".")


def _dump(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False, separators=(",", ":"))


# The schema is generated from the dataclasses.

def schema() -> dict[str, Any]:
    """JSON Schema of a line of a trace file, and of a whole trace as returned by `to_json`."""
    kinds: dict[str, TypeAdapter[Any]] = {kind: TypeAdapter(cls) for kind, cls in EVENTS.items()}
    kinds |= {"header": TypeAdapter(Header), "stamp": _STAMP}
    _, made = TypeAdapter.json_schemas([(kind, "validation", adapter) for kind, adapter in kinds.items()])
    definitions = made["$defs"]
    stamp = definitions.pop(_Stamp.__name__)
    for kind, cls in EVENTS.items():
        definitions[cls.__name__] = _stamped_schema(kind, definitions[cls.__name__], stamp)
    definitions["Header"]["additionalProperties"] = False
    definitions["Stamped"] = {"oneOf": [{"$ref": f"#/$defs/{cls.__name__}"} for cls in EVENTS.values()]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Decoding playground trace",
            "oneOf": [_head_schema(), {"$ref": "#/$defs/Stamped"}], "$defs": definitions}


def _stamped_schema(kind: str, event: dict[str, Any], stamp: dict[str, Any]) -> dict[str, Any]:
    properties = {**stamp["properties"], "kind": {"const": kind}, **event["properties"]}
    return {**event, "properties": properties, "required": [*stamp["required"], "kind"], "additionalProperties": False}


def _head_schema() -> dict[str, Any]:
    lists = {"lanes": "Header", "events": "Stamped"}
    arrays = {name: {"type": "array", "items": {"$ref": f"#/$defs/{of}"}} for name, of in lists.items()}
    return {"description": "First line of a file; with `events`, a whole trace.", "type": "object",
            "properties": {"format": {"const": FORMAT}, "version": {"const": VERSION}, **arrays},
            "required": ["format", "version", "lanes"]}
