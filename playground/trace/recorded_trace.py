"""A trace: what each lane was, and all events in order. Page, metrics, lessons and tests read nothing else.

On disk it is JSON Lines. The first line is {"format": "decoding-playground-trace", "version": 1, "lanes": [header,
...]}, every other line one stamped event. Fields that hold their default are left out. `schema()` describes both kinds
of line. A trace that can be read may still contradict itself: `check` says where. Imports neither torch nor gradio.
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
    """Headers, one a lane, and stamped events whose `seq` increases. A lane keeps its number when it is taken out
    alone.
    """

    headers: list[Header]
    events: list[Stamped] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = {header.lane for header in self.headers}
        if len(self._numbers) < len(self.headers):
            raise ValueError("two lanes have the same number")
        given, self.events = self.events, []
        for stamped in given:
            self.append(stamped)

    def append(self, stamped: Stamped) -> None:
        """Raises ValueError for a lane without a header and for a `seq` that does not increase."""
        if stamped.lane not in self._numbers:
            raise ValueError(f"there is no lane {stamped.lane}")
        if self.events and stamped.seq <= self.events[-1].seq:
            raise ValueError(f"seq {stamped.seq} follows seq {self.events[-1].seq}; it must increase")
        self.events.append(stamped)

    def lane(self, i: int) -> Trace:
        """The trace of lane number i alone; raises KeyError where there is none."""
        headers = [header for header in self.headers if header.lane == i]
        if not headers:
            raise KeyError(i)
        return Trace(headers, [stamped for stamped in self.events if stamped.lane == i])

    def save(self, path: str | Path) -> None:
        """Write the file in one go; raises Refusal where it cannot be written or a number is not finite."""
        try:
            lines = [_dump(self._head()), *(_dump(stamped.to_json()) for stamped in self.events)]
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except (OSError, ValueError) as error:
            raise Refusal(f"The trace cannot be saved to {path}: {_reason(error)}.", "path") from error

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file; raises Refusal with the line and the reason."""
        return _read(_lines(Path(path)))

    def to_json(self) -> dict[str, Any]:
        """The whole trace as one plain dict: the first line of a file, and the others under "events"."""
        return {**self._head(), "events": [stamped.to_json() for stamped in self.events]}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Trace:
        """The inverse of `to_json`; raises Refusal with the event and the reason."""
        return _read(_entries(document))

    def _head(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "lanes": [asdict(header) for header in self.headers]}


def replay(trace: Trace, speed: float = 1.0) -> Iterator[tuple[float, Stamped]]:
    """Events as lanes started together would have made them, each with the seconds to wait before it.

    Lanes share a machine but each has its own clock, so events come in the order of those clocks, not of `seq`: a fast
    lane ends first. Within a lane the order is kept. `speed` 2 halves the waits; raises Refusal unless it is above 0.
    """
    if not speed > 0:
        raise Refusal(f"The speed must be above 0, not {speed}.", "speed")
    return _paced(sorted(trace.events, key=lambda stamped: (stamped.at, stamped.seq)), speed)


def _paced(events: list[Stamped], speed: float) -> Iterator[tuple[float, Stamped]]:
    before = 0.0
    for stamped in events:
        yield (stamped.at - before) / speed, stamped
        before = stamped.at


# Reading: pairs of a place, named for the person who has to find it, and what stands there.

def _read(entries: Iterator[tuple[str, Any]]) -> Trace:
    place, head = next(entries)
    with _refusing(place):
        trace = Trace(_headers(head))
    for place, entry in entries:
        with _refusing(place):
            trace.append(_stamped(entry))
    return trace


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        lines = path.read_bytes().splitlines(keepends=True) or [b""]
    except OSError as error:
        raise Refusal(f"{path} cannot be opened: {_reason(error)}.", "path") from error
    for number, line in enumerate(lines, 1):
        place = f"Line {number} of {path.name}"
        with _refusing(place):
            entry = _parse(line)
        yield place, entry


def _entries(document: Any) -> Iterator[tuple[str, Any]]:
    yield "The trace", document
    for number, entry in enumerate(document.get("events", [])):
        yield f"Event {number} of the trace", entry


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line, parse_constant=_no_constant, object_pairs_hook=_object)
    except KeyTwice:
        raise
    except (ValueError, RecursionError):  # RecursionError: a file made of ten thousand brackets
        raise ValueError("it is not JSON" if line.endswith(b"\n") else "it is cut off") from None


class KeyTwice(ValueError):
    """An object has two values for one key, and readers disagree about which of them holds."""


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
        raise ValueError("it does not begin a decoding playground trace")
    version = head.get("version")
    if type(version) is not int or version < 1:
        raise ValueError(f"{version!r} is no version of the format")
    if version > VERSION:
        raise ValueError(f"it has version {version} of the format, and this playground reads versions up to {VERSION}")
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
    """A misspelt field would otherwise pass as one that holds its default."""
    unknown = sorted(set(names) - {f.name for f in fields(cls)})
    if unknown:
        raise ValueError(f"{getattr(cls, 'kind', 'a header')} has no field {unknown[0]!r}")


@contextmanager
def _refusing(place: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise Refusal(f"{place} cannot be read: {_reason(error)}.", "path") from error


def _reason(error: Exception) -> str:
    """What went wrong as part of a sentence."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return (getattr(error, "strerror", None) or str(error)).rstrip(".")


def _dump(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False, separators=(",", ":"))


# The schema is made from the dataclasses, so it cannot say anything else than they do.

def schema() -> dict[str, Any]:
    """JSON Schema of a line of a trace file, and of a whole trace as `to_json` gives it."""
    kinds = {kind: TypeAdapter(cls) for kind, cls in EVENTS.items()} | {"header": TypeAdapter(Header), "stamp": _STAMP}
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
