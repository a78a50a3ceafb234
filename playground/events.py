"""The vocabulary of the playground: every fact that may reach a screen, one small dataclass each.

Strategies, the lane and the session yield these while they run. A trace is nothing but a header and the stamped events
in order, so whatever a page, a metric or a test wants to know must be found here. Entropies and log-probabilities are
in nats and always over the whole vocabulary. Token ids come with their pieces, so a reader needs no tokenizer.

This module imports neither torch nor gradio.
"""
from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import TypeAdapter

VERSION = 1

Origin = Literal["sampled", "draft", "forced", "redraw", "bonus"]
Drawn = Literal["independent", "without_replacement", "deterministic"]
Reason = Literal["end", "length", "stop_string", "grammar", "stopped", "failed"]
Runs = list[tuple[int, int]]
"""Half-open stretches of true positions, [(0, 4), (60, 124)]."""


class Candidate(NamedTuple):
    """One of the most probable tokens of a row, before and after masks and samplers."""

    id: int
    piece: str
    raw: float  # probability as the model gave it
    final: float  # probability it was drawn with; 0 where it fell
    fell: str | None = None  # what removed it: "mask", "top_k", ...


class Test(NamedTuple):
    """One guess held against the target: kept when draw < ratio, as the verifier reckons it."""

    node: int
    p: float
    q: float
    draw: float | None  # None where nothing was left to chance
    kept: bool


@dataclass(slots=True)
class Event:
    """A fact about one sequence of one lane. `kind` names it in JSON."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """A plain dict; fields that still hold their default are left out, so a trace stays small."""
        shown = {name: value for name, value, default in self._items() if value != default}
        return {"kind": self.kind, **shown}

    def _items(self):
        return ((name, getattr(self, name), default) for name, default in _defaults(type(self)))


@dataclass(slots=True)
class Forward(Event):
    """One pass of one model. FLOPs are computed from the shapes, seconds are measured."""

    kind: ClassVar[str] = "forward"
    stream: str = "target"
    phase: Literal["prefill", "decode", "catch_up"] = "decode"
    tokens: int = 1  # rows that went in
    context: int = 0  # positions they could see, themselves left out
    layers: int = 0  # decoder layers that ran
    lanes: int = 1  # lanes whose rows went through together; the seconds are this lane's share, by rows
    seconds: float = 0.0
    flops: float = 0.0
    readers: int = 1  # lanes that these very rows were computed for, once; seconds and FLOPs are this lane's equal part
    # seconds it took besides, made aside while the lane did something else: no part of the lane's clock
    meanwhile: float = 0.0


@dataclass(slots=True)
class Step(Event):
    """What the model thought before one committed token: the row it was chosen from."""

    kind: ClassVar[str] = "step"
    position: int = 0  # index among the generated tokens, 0 for the first
    entropy: float = 0.0  # of the raw row
    final_entropy: float = 0.0  # after masks and samplers
    chosen: int = -1
    top: list[Candidate] = field(default_factory=list)
    stream: str = "target"
    sequence: int = 0


@dataclass(slots=True)
class Draft(Event):
    """Guesses, seen before the verdict. Node i continues parents[i]; -1 is the end of the committed text."""

    kind: ClassVar[str] = "draft"
    round: int = 0
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    q: list[float] = field(default_factory=list)  # probability the drafter gave each guess; 1 where it is certain of it
    source: str = ""  # strategy that guessed
    drawn: Drawn = "deterministic"
    sequence: int = 0


@dataclass(slots=True)
class Verdict(Event):
    """Which guesses stand. `kept` is the accepted path from the root down; `tests` are the guesses looked at, in order.
    """

    kind: ClassVar[str] = "verdict"
    round: int = 0
    kept: list[int] = field(default_factory=list)
    tests: list[Test] = field(default_factory=list)
    token: int = -1  # the token that follows the kept path
    piece: str = ""
    origin: Origin = "bonus"  # bonus: nothing was refused; redraw: it replaces a refused guess
    leftover: list[Candidate] = field(default_factory=list)  # what the redraw was drawn from
    sequence: int = 0


@dataclass(slots=True)
class Commit(Event):
    """The only event that lengthens the text. `text` is what became readable: bytes of a half-finished letter wait."""

    kind: ClassVar[str] = "commit"
    position: int = 0  # index of the first of these among the generated tokens
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    text: str = ""
    # raw, of the chosen token; None where no row was computed
    logprobs: list[float | None] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    sequence: int = 0
    # the sequence these tokens grew on, where that is another one: its Steps and Masks are theirs too
    grown_on: int = 0


@dataclass(slots=True)
class Rollback(Event):
    """The last `count` committed tokens are taken back; `text` is the whole generated text that is left."""

    kind: ClassVar[str] = "rollback"
    count: int = 0
    text: str = ""
    sequence: int = 0


@dataclass(slots=True)
class Cache(Event):
    """What a KV cache holds after a keep. `live[layer][head]` are runs of true positions; one layer or one head stands
    for all.
    """

    kind: ClassVar[str] = "cache"
    stream: str = "target"
    length: int = 0  # tokens fed so far, evicted ones included
    layers: int = 0
    heads: int = 0  # KV heads
    live: list[list[Runs]] = field(default_factory=list)
    scratch: int = 0  # slots held for guesses before this keep
    evicted: int = 0  # slots freed by this keep, summed over layers and heads
    merged: int = 0  # of them, slots whose keys and values were merged into others
    packed: int = 0  # oldest tokens that are held in a coarser form than they were written in
    bytes: int = 0
    common: int = 0  # first tokens that are held once for several lanes, which began with them
    common_bytes: int = 0  # of `bytes`, what these take; all those lanes together hold it once
    # by layer and head: (position, the one it was merged into) of this keep
    joined: list[list[list[tuple[int, int]]]] = field(default_factory=list)


@dataclass(slots=True)
class Mask(Event):
    """What the grammar allows before the token at `position`."""

    kind: ClassVar[str] = "mask"
    position: int = 0
    allowed: int = 0
    vocabulary: int = 0
    banned: float = 0.0  # raw probability of everything the mask removed
    favourites: list[Candidate] = field(default_factory=list)  # the most probable tokens among the banned
    # ids that had no alternative and were written without asking the model
    forced: list[int] = field(default_factory=list)
    accepting: bool = False  # the text could end here
    state: str = ""
    seconds: float = 0.0
    sequence: int = 0


@dataclass(slots=True)
class Switch(Event):
    """Another model or mode takes over from `position` on."""

    kind: ClassVar[str] = "switch"
    position: int = 0
    to: str = ""
    why: str = ""
    sequence: int = 0


@dataclass(slots=True)
class Branches(Event):
    """Sequences that were born and dropped, and how the living ones score."""

    kind: ClassVar[str] = "branches"
    born: list[tuple[int, int]] = field(default_factory=list)  # (sequence, parent sequence)
    dropped: list[int] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)  # complete texts: nothing follows them any more


@dataclass(slots=True)
class Fill(Event):
    """Masked positions of a canvas that got their token."""

    kind: ClassVar[str] = "fill"
    positions: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    sequence: int = 0


@dataclass(slots=True)
class Figure(Event):
    """Whatever a method wants seen that fits no other kind; the page has one renderer per shape.

    scalar: {"x": int, "series": {name: number}}, and "lines": {name: number} for thresholds. x is a token position,
    from 0, unless "axis" names what else is counted, such as "sample". bars: {"labels": [...], "values": [...]}.
    matrix: {"rows": [...], "columns": [...], "values": [[...]]}. tree: {"labels": [...], "parents": [...], "values":
    [...]}.  spans: {"spans": [[from, to, label, value]]}, over token positions. points: {"points": [[x, y, label,
    group, crossed out]]}, in a plane whose middle is 0, 0, and "path": [[x, y, label]] for arrows from there.
    """

    kind: ClassVar[str] = "figure"
    shape: Literal["scalar", "bars", "matrix", "tree", "spans", "points"] = "scalar"
    name: str = ""  # figures of one name continue each other
    data: dict[str, Any] = field(default_factory=dict)
    sequence: int = 0


@dataclass(slots=True)
class Note(Event):
    """One line for the learner: what just happened, in plain words."""

    kind: ClassVar[str] = "note"
    text: str = ""
    sequence: int = 0


@dataclass(slots=True)
class Judged(Event):
    """How right the lane's text is, told once before it ends where the answer to the prompt is known."""

    kind: ClassVar[str] = "judged"
    score: float = 0.0  # 0 to 1; 1 is right
    expected: str = ""  # the known answer, or what is asked of one where many are right
    checked: bool = True  # False where it could only be told by running a program, and none may be run
    # where it was not checked: what keeps a program from being run, empty where the owner of the page allows none
    why: str = ""


@dataclass(slots=True)
class Done(Event):
    kind: ClassVar[str] = "done"
    reason: Reason = "end"


@dataclass(slots=True)
class Failed(Event):
    """The lane cannot go on. `message` says what to do; the other lanes are untouched."""

    kind: ClassVar[str] = "failed"
    message: str = ""


EVENTS: dict[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}


@dataclass(slots=True)
class Part:
    """One piece of a lane as it was set: the decoder, a slot or a toggle."""

    name: str
    kind: str
    knobs: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Header:
    """What a lane was before its first event; enough to run it again."""

    lane: int = 0
    title: str = ""
    model: str = ""
    revision: str = ""
    dtype: str = ""
    device: str = ""
    quantization: str = "none"
    draft: str = ""
    strategy: str = ""
    parts: list[Part] = field(default_factory=list)
    guarantee: list[str] = field(default_factory=list)
    reconstruction: bool = False
    seed: int = 0
    max_new_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    chat: bool = False
    context: str = ""  # a passage the lane read before the prompt
    before: list[tuple[str, str]] = field(default_factory=list)  # earlier turns of the chat: (user, assistant)
    prompt: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    prompt_pieces: list[str] = field(default_factory=list)
    vocabulary: int = 0
    # tokens the text was made to begin with: how a fork differs from its origin
    forced: list[int] = field(default_factory=list)
    canvas: int = 0  # positions that are filled in any order; 0 where text grows from left to right
    memory: str = ""  # digest of what the strategy remembered from earlier runs; empty where it remembers nothing


class Stamped(NamedTuple):
    """An event as the session hands it out: whose it is, its place in the whole run, the lane's own clock in seconds.
    """

    lane: int
    seq: int
    at: float
    event: Event

    def to_json(self) -> dict[str, Any]:
        return {"lane": self.lane, "seq": self.seq, "at": round(self.at, 6), **self.event.to_json()}


def event_from_json(fields_: dict[str, Any]) -> Event:
    """Read one event; raises ValueError where a field is missing its type or the kind is unknown."""
    kind = fields_.get("kind")
    if not isinstance(kind, str) or kind not in EVENTS:
        raise ValueError(f"unknown event kind {kind!r}")
    return _adapter(EVENTS[kind]).validate_python({k: v for k, v in fields_.items() if k != "kind"})


def header_from_json(fields_: dict[str, Any]) -> Header:
    return _adapter(Header).validate_python(fields_)


@cache
def _adapter(cls: type) -> TypeAdapter:
    return TypeAdapter(cls)


@cache
def _defaults(cls: type[Event]) -> list[tuple[str, Any]]:
    blank = cls()
    return [(f.name, getattr(blank, f.name)) for f in fields(cls)]
