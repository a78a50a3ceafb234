"""Checks the consistency of a trace: every way in which its events contradict each other, as sentences.

Files that cannot be parsed are rejected earlier, while loading. Imports neither torch nor gradio.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from playground.events import (
    Cache,
    Candidate,
    Commit,
    Done,
    Draft,
    Event,
    Failed,
    Fill,
    Judged,
    Mask,
    Rollback,
    Stamped,
    Step,
    TopLogprobs,
    Verdict,
)
from playground.trace.cache_contents import CacheContents
from playground.trace.transcript import Written, advance
from playground.trace.validate_caches import cache_problems

if TYPE_CHECKING:
    from playground.trace.recorded_trace import Trace

Kind = TypeVar("Kind", Draft, Verdict)
Rounds = dict[tuple[int, int], list[tuple[Stamped, Kind]]]  # the drafts, or the verdicts, of each round
ROUNDING = 1e-5  # tolerance for probabilities from a float32 softmax

# A piece matches its exact text, except for two kinds of pieces that match any text, the empty one included.
BYTE = re.compile("<0x[0-9A-F]{2}>")  # one byte of a character that several tokens form
NAME = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")  # name of a special token, "<|end|>" or "[SEP]", which adds no text
UNREAD = "\0"
OPENING = re.compile("^(\0*) ")


def check(trace: Trace) -> list[str]:
    """The inconsistencies, one sentence each, with the lane and the `seq` of the event; empty for a valid trace."""
    lanes = [(header.lane, trace.lane(header.lane).events) for header in trace.headers]
    rules = (
        _clock, _ending, _judged, _positions, _spelling, _rounds, _verdict_commits, _shapes, _caches, _probabilities,
        _finite, _canvas
    )
    return [f"lane {lane}: {problem}" for lane, events in lanes for rule in rules for problem in rule(events)]


def _clock(events: list[Stamped]) -> Iterator[str]:
    for before, after in pairwise(events):
        if after.at < before.at:
            yield _at(after, f"the clock goes backwards from {before.at} to {after.at}")


def _ending(events: list[Stamped]) -> Iterator[str]:
    ends = [i for i, stamped in enumerate(events) if isinstance(stamped.event, (Done, Failed))]
    if not ends:
        yield "it neither ends nor fails"
    elif ends[0] + 1 < len(events):
        yield _at(events[ends[0] + 1], "it follows the end")


def _judged(events: list[Stamped]) -> Iterator[str]:
    """A text is judged once, directly before its end."""
    for i, stamped in enumerate(events):
        if not isinstance(stamped.event, Judged):
            continue
        if not 0 <= stamped.event.score <= 1:
            yield _at(stamped, f"a score of {stamped.event.score} is not between 0 and 1")
        if i + 1 < len(events) and not isinstance(events[i + 1].event, Done):
            yield _at(stamped, "it judges a text that is not complete")


def _positions(events: list[Stamped]) -> Iterator[str]:
    """The positions of Commits and the counts of Rollbacks agree with the number of committed tokens."""
    found = {0: Written()}
    for stamped in events:
        event = stamped.event
        committed = len(found.get(getattr(event, "sequence", 0), Written()).tokens)
        if isinstance(event, Commit) and event.position != committed:
            yield _at(stamped, f"its position is {event.position}, but {committed} tokens are committed")
        if isinstance(event, Rollback) and not 0 <= event.count <= committed:
            yield _at(stamped, f"it removes {event.count} tokens, but {committed} are committed")
        advance(found, stamped)


def _spelling(events: list[Stamped]) -> Iterator[str]:
    """The joined pieces match the text of the Commits, before every Rollback and at the end."""
    found = {0: Written()}
    for stamped in events:
        if isinstance(stamped.event, Rollback):
            yield from _misspelt(stamped.event.sequence, found)
        advance(found, stamped)
    for sequence in found:
        yield from _misspelt(sequence, found)


def _misspelt(sequence: int, found: dict[int, Written]) -> Iterator[str]:
    """Some tokenizers drop the leading space of a text, which the first piece still has."""
    written = found.get(sequence, Written())
    pieces = [token.piece or "" for token in written.tokens]
    shape = "".join(UNREAD if NAME.fullmatch(piece) else BYTE.sub(UNREAD, piece) for piece in pieces)
    if not any(_fits(written.text, form.split(UNREAD)) for form in (shape, OPENING.sub(r"\1", shape))):
        yield f"sequence {sequence}: the pieces {''.join(pieces)!r} do not spell the text {written.text!r}"


def _fits(text: str, parts: list[str]) -> bool:
    """Whether the text consists of the parts in order with anything between them, as in a glob pattern."""
    first, *others = parts
    if not others:
        return text == first
    at = len(first)
    for part in others[:-1]:  # the leftmost match of each part leaves the most text for the rest
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return text.startswith(first) and text[at:].endswith(others[-1])


def _rounds(events: list[Stamped]) -> Iterator[str]:
    """Every Draft has one Verdict. The last may lack it if the lane was stopped, failed, or has no end."""
    drafts, verdicts = _by_round(events, Draft), _by_round(events, Verdict)
    yield from _repeated(drafts)
    yield from _repeated(verdicts)
    for key, ((stamped, verdict), *_) in verdicts.items():
        if key not in drafts or drafts[key][0][0].seq > stamped.seq:
            yield _at(stamped, f"round {verdict.round} has no draft before it")
        else:
            yield from (_at(stamped, problem) for problem in _invalid_nodes(verdict, drafts[key][0][1]))
    waiting = [number for sequence, number in drafts if (sequence, number) not in verdicts]
    yield from (
        f"the draft of round {number} has no verdict" for number in (waiting[:-1] if _cut_short(events) else waiting)
    )


def _invalid_nodes(verdict: Verdict, draft: Draft) -> Iterator[str]:
    outside = [n for n in [*verdict.kept, *(test.node for test in verdict.tests)] if not 0 <= n < len(draft.parents)]
    if outside:
        yield f"node {outside[0]} is not in a draft of {len(draft.parents)} nodes"
    elif verdict.kept and [draft.parents[n] for n in verdict.kept] != [-1, *verdict.kept[:-1]]:
        yield f"the accepted nodes {verdict.kept} are not a path from the root"


def _verdict_commits(events: list[Stamped]) -> Iterator[str]:
    """The accepted path and the token after it are committed after a Verdict, unless the run ends.

    One Commit may hold all of them, followed by tokens that the grammar forces, or a part of them.
    """
    drafts = {key: draft for key, ((_, draft), *_) in _by_round(events, Draft).items()}
    due: dict[int, list[int]] = {}  # tokens not committed yet, by sequence
    for stamped in events:
        match stamped.event:
            case Verdict() as verdict:
                if due.get(verdict.sequence):
                    yield _at(stamped, "the tokens accepted by the previous verdict were not all committed")
                due[verdict.sequence] = _accepted(verdict, drafts.get(_round(verdict), Draft()))
            case Commit() as commit if due.get(commit.sequence):
                yield from (_at(stamped, problem) for problem in _mismatch(commit, due[commit.sequence]))
                due[commit.sequence] = due[commit.sequence][len(commit.ids):]


def _accepted(verdict: Verdict, draft: Draft) -> list[int]:
    path = [draft.tokens[node] for node in verdict.kept if 0 <= node < len(draft.tokens)]
    return path + [verdict.token] * (verdict.token >= 0)


def _mismatch(commit: Commit, due: list[int]) -> Iterator[str]:
    shared = min(len(commit.ids), len(due))
    if commit.ids[:shared] != due[:shared]:
        yield f"it commits {commit.ids}, but the verdict accepted {due}"
    elif any(origin != "forced" for origin in commit.origins[shared:]):
        yield f"it commits {len(commit.ids)} tokens, but the verdict accepted {shared}"


def _shapes(events: list[Stamped]) -> Iterator[str]:
    """Parallel lists have the same length, and counts are in range."""
    for stamped in events:
        match stamped.event:
            case Commit() as it:
                yield from _uneven(stamped, it.ids, it.pieces, it.logprobs, it.origins)
            case Draft() as it:
                yield from _uneven(stamped, it.tokens, it.pieces, it.parents, it.q)
                if any(not -1 <= parent < node for node, parent in enumerate(it.parents)):
                    yield _at(stamped, "the parent of a node does not precede it")
            case Fill() as it:
                known = [it.entropies] if it.entropies else []
                yield from _uneven(stamped, it.positions, it.ids, it.pieces, it.confidences, *known)
            case Mask() as it if not 0 <= it.allowed <= it.vocabulary:
                yield _at(stamped, f"{it.allowed} tokens are allowed in a vocabulary of {it.vocabulary}")


def _canvas(events: list[Stamped]) -> Iterator[str]:
    """A step fills masks, or names what it replaces; what it masks again was filled."""
    held: dict[int, str] = {}
    for stamped in events:
        if not isinstance(stamped.event, Fill):
            continue
        event = stamped.event
        filled = dict(zip(event.positions, event.pieces))
        if event.replaced != {position: held[position] for position in filled if position in held}:
            yield _at(stamped, "what it replaces is not what these positions hold")
        if event.remasked != {i: held.get(i) for i in event.remasked} or event.remasked.keys() & filled.keys():
            yield _at(stamped, "what it masks again is not what these positions hold")
        held = {i: piece for i, piece in (held | filled).items() if i not in event.remasked}


def _uneven(stamped: Stamped, *columns: list[Any]) -> Iterator[str]:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        yield _at(stamped, f"its lists have lengths {lengths}")


def _caches(events: list[Stamped]) -> Iterator[str]:
    """Every Cache event describes a possible cache, and follows from the previous one of its stream."""
    replays: dict[str, CacheContents] = {}
    for stamped in events:
        if isinstance(stamped.event, Cache):
            replay = replays.setdefault(stamped.event.stream, CacheContents())
            yield from (_at(stamped, problem) for problem in cache_problems(stamped.event, replay))


def _probabilities(events: list[Stamped]) -> Iterator[str]:
    for stamped in events:
        invalid = [p for p in _probabilities_of(stamped.event) if not -ROUNDING <= p <= 1 + ROUNDING]
        if invalid:
            yield _at(stamped, f"{invalid[0]} is not a probability")


def _probabilities_of(event: Event) -> list[float]:
    """All probabilities of an event, including those from log-probabilities."""
    match event:
        case Step():
            return _of_candidates(event.top)
        case Draft():
            return event.q
        case Verdict():
            tests = [number for test in event.tests for number in (test.p, test.q, test.draw) if number is not None]
            return tests + _of_candidates(event.leftover)
        case Commit():
            return [math.exp(min(logprob, 1.0)) for logprob in event.logprobs if logprob is not None]
        case TopLogprobs():
            return [math.exp(min(logprob, 1.0)) for _, logprob in event.top]
        case Mask():
            return [event.banned, *_of_candidates(event.favourites)]
    return []


def _of_candidates(candidates: list[Candidate]) -> list[float]:
    return [number for candidate in candidates for number in (candidate.raw, candidate.final)]


def _finite(events: list[Stamped]) -> Iterator[str]:
    """All numbers are finite: JSON has neither NaN nor infinity, so such a trace cannot be saved."""
    for stamped in events:
        if not _all_finite(stamped.to_json()):
            yield _at(stamped, "it contains a number that is not finite")


def _all_finite(value: Any) -> bool:
    match value:
        case float():
            return math.isfinite(value)
        case dict():
            return all(map(_all_finite, value.values()))
        case list() | tuple():
            return all(map(_all_finite, value))
    return True


def _round(event: Draft | Verdict) -> tuple[int, int]:
    return event.sequence, event.round


def _by_round(events: list[Stamped], kind: type[Kind]) -> Rounds[Kind]:
    found: Rounds[Kind] = {}
    for stamped in events:
        if isinstance(stamped.event, kind):
            found.setdefault(_round(stamped.event), []).append((stamped, stamped.event))
    return found


def _repeated(rounds: Rounds[Kind]) -> Iterator[str]:
    for _, *repeated in rounds.values():
        yield from (_at(stamped, f"round {event.round} already has one") for stamped, event in repeated)


def _cut_short(events: list[Stamped]) -> bool:
    last = events[-1].event if events else None
    return not isinstance(last, Done) or last.reason in ("stopped", "failed")


def _at(stamped: Stamped, problem: str) -> str:
    return f"event {stamped.seq} ({stamped.event.kind}): {problem}"
