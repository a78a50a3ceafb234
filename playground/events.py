"""Events: everything that a run reports, one small dataclass for each kind.

Strategies, the lane and the session emit events while they run. A trace consists of headers and stamped events, and
pages, metrics and tests read nothing else. Entropies and log-probabilities are in nats, over the whole vocabulary.
They and seconds are recorded with DIGITS significant digits; what a draft token is tested with, p, q and the draw, is
recorded in full, so that the verdict can be computed again.
Token ids come with their pieces, so that a reader needs no tokenizer. Imports neither torch nor gradio.
"""
from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import StringConstraints, TypeAdapter

VERSION = 1
DIGITS = 7  # of measured and computed numbers: float32 has no more, and the rest would make traces 4 % larger

Origin = Literal["sampled", "draft", "forced", "redraw", "bonus"]
Drawn = Literal["independent", "without_replacement", "deterministic"]
Reason = Literal["end", "length", "stop_string", "grammar", "stopped", "failed"]
Runs = list[tuple[int, int]]
"""Half-open ranges of positions in the text, [(0, 4), (60, 124)]."""
_ITEM = "[0-9a-z]{1,6}([+>][0-9a-z]{1,6})?"
_HEAD = f"({_ITEM}( {_ITEM})*)?"
EVICTIONS = f"^{_HEAD}(,{_HEAD})*$"
Evictions = Annotated[str, StringConstraints(pattern=EVICTIONS)]
"""Evicted positions of the heads of a layer; `playground.trace.cache_contents` describes the format and reads it."""


def rounded(number: float) -> float:
    """The number with DIGITS significant digits."""
    return float(f"{number:.{DIGITS}g}")


def rounded_each(numbers: list[float]) -> list[float]:
    """The numbers with DIGITS significant digits."""
    return [rounded(number) for number in numbers]


class Candidate(NamedTuple):
    """One of the most probable tokens of a row, before and after masks and samplers."""

    id: int
    piece: str
    raw: float  # the model's own probability
    final: float  # probability after masks and samplers, from which greedy decoding takes the largest; 0 if removed
    fell: str | None = None  # the stage that removed it: "mask", "top_k", ...


class Test(NamedTuple):
    """The test of one draft token: accepted if draw < min(1, p / q), or `chance` where the verifier has another rule.

    Where tokens are drawn without replacement, q is that without the rejected siblings; `Draft.q` holds the
    probabilities that the tokens were drawn with.
    """

    node: int
    p: float  # probability under the target, or in the residual
    q: float  # probability under the drafter, as it enters the test
    draw: float | None  # uniform number; None if nothing was drawn
    kept: bool  # accepted
    residual: bool = False  # p is the probability in the residual, which replaces the target after a rejected sibling
    chance: float | None = None  # probability of acceptance, given the tests before, where it is not min(1, p / q)


@dataclass(slots=True)
class Event:
    """Base class of events, which concern one lane, and mostly one sequence of it. `kind` identifies it in JSON."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """A plain dict. Fields with their default value are omitted, which keeps traces small."""
        shown = {name: value for name, value, default in self._items() if value != default}
        return {"kind": self.kind, **shown}

    def _items(self):
        return ((name, getattr(self, name), default) for name, default in _defaults(type(self)))


@dataclass(slots=True)
class Forward(Event):
    """One forward of one model. FLOPs are computed from the shapes, seconds are measured."""

    kind: ClassVar[str] = "forward"
    stream: str = "target"
    phase: Literal["prefill", "decode", "catch_up"] = "decode"
    tokens: int = 1  # input tokens
    context: int = 0  # slots they could attend to, without the input tokens
    layers: int = 0  # decoder layers that ran
    lanes: int = 1  # lanes batched in this forward; `seconds` is this lane's share, by rows
    seconds: float = 0.0
    flops: float = 0.0
    readers: int = 1  # lanes these rows were computed for, as for a shared prefix; they split seconds and FLOPs equally
    meanwhile: float = 0.0  # seconds that overlapped with other work of the lane, not on its clock


@dataclass(slots=True)
class Step(Event):
    """The distribution that one committed token was chosen from."""

    kind: ClassVar[str] = "step"
    position: int = 0  # index among the generated tokens, 0 for the first
    entropy: float = 0.0  # before masks and samplers
    final_entropy: float = 0.0  # after masks and samplers, of the distribution that `Candidate.final` is from
    chosen: int = -1
    top: list[Candidate] = field(default_factory=list)
    stream: str = "target"
    sequence: int = 0


@dataclass(slots=True)
class TopLogprobs(Event):
    """The most probable tokens at one position, as a server reports them: without ids, entropy and processors."""

    kind: ClassVar[str] = "top_logprobs"
    position: int = 0
    top: list[tuple[str, float]] = field(default_factory=list)  # piece and log-probability, best first
    sequence: int = 0


@dataclass(slots=True)
class Draft(Event):
    """Draft tokens before verification. Node i continues parents[i]; -1 is the end of the committed text."""

    kind: ClassVar[str] = "draft"
    round: int = 0
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    q: list[float] = field(default_factory=list)  # the drafter's probability of each draft token; 1 if it has none
    source: str = ""  # strategy that proposed it
    drawn: Drawn = "deterministic"
    sequence: int = 0


@dataclass(slots=True)
class Verdict(Event):
    """Which draft tokens are accepted. `kept` is the accepted path from the root, `tests` the tests in order."""

    kind: ClassVar[str] = "verdict"
    round: int = 0
    kept: list[int] = field(default_factory=list)
    tests: list[Test] = field(default_factory=list)
    token: int = -1  # the token that follows the accepted path; -1 for none
    piece: str = ""
    origin: Origin = "bonus"  # bonus: nothing was rejected; redraw: it replaces a rejected draft token
    leftover: list[Candidate] = field(default_factory=list)  # what a redraw was drawn from; itself if nothing was drawn
    sequence: int = 0


@dataclass(slots=True)
class Commit(Event):
    """The only event that extends the text. `text` is the new readable part: incomplete UTF-8 characters wait."""

    kind: ClassVar[str] = "commit"
    position: int = 0  # index of the first of these among the generated tokens
    ids: list[int] = field(default_factory=list)  # -1 for a token whose id a server does not report
    pieces: list[str] = field(default_factory=list)
    text: str = ""
    # before masks and samplers; None for tokens without logits
    logprobs: list[float | None] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    sequence: int = 0
    grown_on: int = 0  # if not 0, the sequence that generated these tokens; its Steps and Masks apply to them


@dataclass(slots=True)
class Rollback(Event):
    """The last `count` committed tokens are removed; `text` is the whole generated text that remains."""

    kind: ClassVar[str] = "rollback"
    count: int = 0
    text: str = ""
    sequence: int = 0


@dataclass(slots=True)
class Cache(Event):
    """The contents of a KV cache after a commit, as the difference from the previous event of the stream.

    All positions from its length to the new one are added to every layer and head, then those in `dropped` are removed.
    If `live` is there, the contents are listed anew instead: `live[layer][head]` are ranges of positions in the text,
    from which those in `dropped` are removed. If all layers, or all heads, are equal, only one is listed.
    `playground.trace.cache_contents` restores what is live after each event.
    """

    kind: ClassVar[str] = "cache"
    stream: str = "target"
    length: int = 0  # tokens read so far, evicted ones included
    layers: int = 0  # those with keys and values
    heads: int = 0  # KV heads
    live: list[list[Runs]] = field(default_factory=list)
    scratch: int = 0  # slots of draft tokens before this commit
    evicted: int = 0  # slots freed by this commit, summed over layers and heads
    merged: int = 0  # of these, slots whose keys and values were merged into others
    packed: int = 0  # oldest tokens whose slots are quantised
    bytes: int = 0
    common: int = 0  # leading tokens stored once for several lanes that share this prefix
    common_bytes: int = 0  # of `bytes`, the shared part, which exists once for all these lanes
    # by layer and head: (position, position it was merged into) in this commit; now a part of `dropped`
    joined: list[list[list[tuple[int, int]]]] = field(default_factory=list)
    dropped: list[Evictions] = field(default_factory=list)  # by layer: the evicted positions of its heads
    state_bytes: int = 0  # of `bytes`, the states of recurrent layers, which hold no positions


@dataclass(slots=True)
class Mask(Event):
    """The tokens that the grammar allows at `position`."""

    kind: ClassVar[str] = "mask"
    position: int = 0
    allowed: int = 0
    vocabulary: int = 0
    banned: float = 0.0  # raw probability of all tokens the mask removed
    favourites: list[Candidate] = field(default_factory=list)  # the most probable of the removed tokens
    forced: list[int] = field(default_factory=list)  # token ids without an alternative, committed without a forward
    accepting: bool = False  # the text may end here
    state: str = ""
    seconds: float = 0.0
    sequence: int = 0


@dataclass(slots=True)
class Switch(Event):
    """Another model or mode generates from `position` on."""

    kind: ClassVar[str] = "switch"
    position: int = 0
    to: str = ""
    why: str = ""
    sequence: int = 0


@dataclass(slots=True)
class Branches(Event):
    """Sequences that were forked and dropped, and the scores of the live ones.

    Where scores are normalised by length, `sums` holds what was normalised. Scores of one event compare sequences; a
    dropped sequence has the score of an earlier step.
    """

    kind: ClassVar[str] = "branches"
    born: list[tuple[int, int]] = field(default_factory=list)  # (sequence, parent sequence)
    dropped: list[int] = field(default_factory=list)
    scores: dict[int, float] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)  # sequences whose text is complete
    sums: dict[int, float] = field(default_factory=dict)  # scores before length normalisation


@dataclass(slots=True)
class Fill(Event):
    """Positions of a canvas that were filled: masks, or others whose token was replaced. In the same step some may have
    become masks again.
    """

    kind: ClassVar[str] = "fill"
    positions: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    # of the model's distributions before these positions were filled, in nats; empty if they are not known
    entropies: list[float] = field(default_factory=list)
    sequence: int = 0
    replaced: dict[int, str] = field(default_factory=dict)  # by filled position that held a token, its piece
    remasked: dict[int, str] = field(default_factory=dict)  # by position that is masked again, the piece it held


@dataclass(slots=True)
class Figure(Event):
    """Data of a method for a chart. The page has one renderer for each shape:

    - scalar: {"x": int, "series": {name: number}}, and "lines": {name: number} for thresholds. x is a token position,
      from 0, unless "axis" names another unit, such as "sample".
    - bars: {"labels": [...], "values": [...]}.
    - matrix: {"rows": [...], "columns": [...], "values": [[...]]}.
    - tree: {"labels": [...], "parents": [...], "values": [...]}.
    - spans: {"spans": [[from, to, label, value]]}, over token positions, and "shades": true if each is one token whose
      value, from 0 to 1, the page may show as the token's colour (a watermark's detection). "parts": for each span the
      parts of the network that its label names, written as `switch_part` reads them, which the page offers to switch
      off.
    - points: {"points": [[x, y, label, group, crossed out]]} in a plane centred at 0, 0, and "path": [[x, y, label]]
      for arrows from the centre.
    """

    kind: ClassVar[str] = "figure"
    shape: Literal["scalar", "bars", "matrix", "tree", "spans", "points"] = "scalar"
    name: str = ""  # figures with the same name form one chart
    data: dict[str, Any] = field(default_factory=dict)
    sequence: int = 0


@dataclass(slots=True)
class Note(Event):
    """One line that explains in plain words what just happened."""

    kind: ClassVar[str] = "note"
    text: str = ""
    sequence: int = 0


@dataclass(slots=True)
class Judged(Event):
    """The score of the lane's text, once before Done, if the prompt has a known answer."""

    kind: ClassVar[str] = "judged"
    score: float = 0.0  # 0 to 1; 1 is correct
    expected: str = ""  # the known answer, or the criterion if several answers are correct
    checked: bool = True  # False if checking requires running a program and that was not possible
    why: str = ""  # if not checked: why no program can run; empty if the owner of the page does not allow it


@dataclass(slots=True)
class Done(Event):
    """The lane has ended."""

    kind: ClassVar[str] = "done"
    reason: Reason = "end"
    limit: str = ""  # what ended the text at a length below the one that was asked for


@dataclass(slots=True)
class Failed(Event):
    """The lane cannot continue. `message` says what to do; the other lanes are not affected."""

    kind: ClassVar[str] = "failed"
    message: str = ""


OfSequence = Step | TopLogprobs | Draft | Verdict | Commit | Rollback | Mask | Switch | Fill | Figure | Note
"""Events that concern one sequence of a lane; all others concern the lane."""

EVENTS: dict[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}


@dataclass(slots=True)
class Part:
    """One strategy of a lane with its knobs: the decoder, the filling of a slot, or a toggle."""

    name: str
    kind: str
    knobs: dict[str, Any] = field(default_factory=dict)
    title: str = ""  # empty in traces of earlier versions


@dataclass(slots=True)
class Header:
    """The configuration of a lane; enough to run it again."""

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
    context: str = ""  # passage before the prompt
    before: list[tuple[str, str]] = field(default_factory=list)  # earlier turns of the chat: (user, assistant)
    form: str = ""  # how passage and prompt become one text; empty for the default
    tools: str = ""  # tools that the chat template describes, a list in JSON
    prompt: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    prompt_pieces: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # what is to know about the prompt, in sentences
    vocabulary: int = 0
    forced: list[int] = field(default_factory=list)  # tokens the generated text begins with, as in a fork of a run
    forked_at: int = -1  # in a fork of a run: index of the first token that was changed; -1 for none, or not recorded
    canvas: int = 0  # positions filled in any order; 0 for text generated from left to right
    remote: str = ""  # host and port of the server that generated the text; empty for a lane decoded here
    memory: str = ""  # digest of the memory from earlier runs; empty if the strategy has none
    # tags around the model's thinking, the start and the end; the start is empty if the text begins with its thinking
    thinking: list[str] = field(default_factory=list)  # empty for a model without such tags


class Stamped(NamedTuple):
    """An event with its lane, its number in the whole run, and its time on the lane's clock."""

    lane: int
    seq: int
    at: float  # seconds
    event: Event

    def to_json(self) -> dict[str, Any]:
        return {"lane": self.lane, "seq": self.seq, "at": round(self.at, 6), **self.event.to_json()}


def event_from_json(fields_: dict[str, Any]) -> Event:
    """Read one event. Raises ValueError for an unknown kind or a field of the wrong type."""
    kind = fields_.get("kind")
    if not isinstance(kind, str) or kind not in EVENTS:
        raise ValueError(f"unknown event kind {kind!r}")
    cls: type = EVENTS[kind]
    return _adapter(cls).validate_python({k: v for k, v in fields_.items() if k != "kind"})


def header_from_json(fields_: dict[str, Any]) -> Header:
    """Read one header. Raises ValueError for a field of the wrong type."""
    return _adapter(Header).validate_python(fields_)


@cache
def _adapter(cls: type) -> TypeAdapter:
    return TypeAdapter(cls)


@cache
def _defaults(cls: type[Event]) -> list[tuple[str, Any]]:
    blank = cls()
    return [(f.name, getattr(blank, f.name)) for f in fields(cls)]
