"""Whether a trace is sound: every way in which its events contradict each other, as sentences.

A file that cannot be read is another matter and refused while loading. Imports neither torch nor gradio.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any

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
    Verdict,
)
from playground.trace.transcript import Written, advance

if TYPE_CHECKING:
    from playground.trace.recorded_trace import Trace

ROUNDING = 1e-5  # by which a probability from a float32 softmax may leave [0, 1]

# A piece stands for its exact text, with two exceptions that stand for any text, none included.
BYTE = re.compile("<0x[0-9A-F]{2}>")  # bytes of a letter spread over several tokens, readable once it is complete
NAME = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")  # the name of a special token, "<|end|>" or "[SEP]", which is silent
UNREAD = "\0"
OPENING = re.compile("^(\0*) ")


def check(trace: Trace) -> list[str]:
    """What is wrong, one sentence each with the lane and, where one event is at fault, its `seq`; empty when the trace
    is sound.
    """
    lanes = [(header.lane, trace.lane(header.lane).events) for header in trace.headers]
    rules = (_clock, _ending, _judged, _positions, _spelling, _rounds, _promises, _shapes, _probabilities, _finite)
    return [f"lane {lane}: {complaint}" for lane, events in lanes for rule in rules for complaint in rule(events)]


def _clock(events: list[Stamped]) -> Iterator[str]:
    for before, after in pairwise(events):
        if after.at < before.at:
            yield _at(after, f"the clock goes back from {before.at} to {after.at}")


def _ending(events: list[Stamped]) -> Iterator[str]:
    ends = [i for i, stamped in enumerate(events) if isinstance(stamped.event, (Done, Failed))]
    if not ends:
        yield "it neither ends nor fails"
    elif ends[0] + 1 < len(events):
        yield _at(events[ends[0] + 1], "it comes after the end")


def _judged(events: list[Stamped]) -> Iterator[str]:
    """A text is judged once, and what follows is its end."""
    verdicts = [i for i, stamped in enumerate(events) if isinstance(stamped.event, Judged)]
    for i in verdicts:
        if not 0 <= events[i].event.score <= 1:
            yield _at(events[i], f"a score of {events[i].event.score} is not between 0 and 1")
        if i + 1 < len(events) and not isinstance(events[i + 1].event, Done):
            yield _at(events[i], "it judges a text that goes on")


def _positions(events: list[Stamped]) -> Iterator[str]:
    """Commits and Rollbacks alone rebuild the ids, each where it says it is."""
    found = {0: Written()}
    for stamped in events:
        event = stamped.event
        standing = len(found.get(getattr(event, "sequence", 0), Written()).tokens)
        if isinstance(event, Commit) and event.position != standing:
            yield _at(stamped, f"it says position {event.position} where {standing} tokens stand")
        if isinstance(event, Rollback) and not 0 <= event.count <= standing:
            yield _at(stamped, f"it takes back {event.count} tokens where {standing} stand")
        advance(found, stamped)


def _spelling(events: list[Stamped]) -> Iterator[str]:
    """Joined pieces are the text of the Commits, before anything is taken back and at the end."""
    found = {0: Written()}
    for stamped in events:
        if isinstance(stamped.event, Rollback):
            yield from _misspelt(stamped.event.sequence, found)
        advance(found, stamped)
    for sequence in found:
        yield from _misspelt(sequence, found)


def _misspelt(sequence: int, found: dict[int, Written]) -> Iterator[str]:
    """Some tokenizers drop the space before a text's first letter, which the piece still has."""
    written = found.get(sequence, Written())
    pieces = [token.piece or "" for token in written.tokens]
    shape = "".join(UNREAD if NAME.fullmatch(piece) else BYTE.sub(UNREAD, piece) for piece in pieces)
    if not any(_fits(written.text, form.split(UNREAD)) for form in (shape, OPENING.sub(r"\1", shape))):
        yield f"sequence {sequence}: the pieces {''.join(pieces)!r} do not spell the text {written.text!r}"


def _fits(text: str, parts: list[str]) -> bool:
    """Whether the text is the parts in order with anything between them, as in a glob pattern."""
    first, *others = parts
    if not others:
        return text == first
    at = len(first)
    for part in others[:-1]:  # the leftmost place of each part leaves the most room for the rest
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return text.startswith(first) and text[at:].endswith(others[-1])


def _rounds(events: list[Stamped]) -> Iterator[str]:
    """Every Draft has one Verdict. The last one may lack it where the lane was stopped, failed, or has no end at all.
    """
    drafts, verdicts = _by_round(events, Draft), _by_round(events, Verdict)
    yield from (_at(again, f"round {again.event.round} had one before") for rounds in (drafts, verdicts)
                for _, *repeated in rounds.values() for again in repeated)
    for key, (verdict, *_) in verdicts.items():
        if key not in drafts or drafts[key][0].seq > verdict.seq:
            yield _at(verdict, f"round {verdict.event.round} has no draft before it")
        else:
            yield from (_at(verdict, wrong) for wrong in _misjudged(verdict.event, drafts[key][0].event))
    waiting = [number for sequence, number in drafts if (sequence, number) not in verdicts]
    yield from (
        f"the draft of round {number} has no verdict" for number in (waiting[:-1] if _cut_short(events) else waiting)
    )


def _misjudged(verdict: Verdict, draft: Draft) -> Iterator[str]:
    outside = [n for n in [*verdict.kept, *(test.node for test in verdict.tests)] if not 0 <= n < len(draft.parents)]
    if outside:
        yield f"node {outside[0]} is not in a draft of {len(draft.parents)} nodes"
    elif verdict.kept and [draft.parents[n] for n in verdict.kept] != [-1, *verdict.kept[:-1]]:
        yield f"the kept nodes {verdict.kept} are not a path from the root"


def _promises(events: list[Stamped]) -> Iterator[str]:
    """What is committed after a Verdict is the kept path and the token after it, cut at most by the end of the run.

    A Commit may hold them together with tokens that the grammar forced after them, or a part of them.
    """
    drafts = {key: first.event for key, (first, *_) in _by_round(events, Draft).items()}
    due: dict[int, list[int]] = {}  # tokens not committed yet, by sequence
    for stamped in events:
        match stamped.event:
            case Verdict() as verdict:
                if due.get(verdict.sequence):
                    yield _at(stamped, "what the verdict before it kept was not committed whole")
                due[verdict.sequence] = _promised(verdict, drafts.get(_round(verdict), Draft()))
            case Commit() as commit if due.get(commit.sequence):
                yield from (_at(stamped, wrong) for wrong in _unlike(commit, due[commit.sequence]))
                due[commit.sequence] = due[commit.sequence][len(commit.ids):]


def _promised(verdict: Verdict, draft: Draft) -> list[int]:
    kept = [draft.tokens[node] for node in verdict.kept if 0 <= node < len(draft.tokens)]
    return kept + [verdict.token] * (verdict.token >= 0)


def _unlike(commit: Commit, due: list[int]) -> Iterator[str]:
    shared = min(len(commit.ids), len(due))
    if commit.ids[:shared] != due[:shared]:
        yield f"it commits {commit.ids} where the verdict gave {due}"
    elif any(origin != "forced" for origin in commit.origins[shared:]):
        yield f"it commits {len(commit.ids)} tokens where the verdict gave {shared}"


def _shapes(events: list[Stamped]) -> Iterator[str]:
    """Lists that speak of the same things are as long as each other, and counts fit what they count."""
    for stamped in events:
        match stamped.event:
            case Commit() as it:
                yield from _uneven(stamped, it.ids, it.pieces, it.logprobs, it.origins)
            case Draft() as it:
                yield from _uneven(stamped, it.tokens, it.pieces, it.parents, it.q)
                if any(not -1 <= parent < node for node, parent in enumerate(it.parents)):
                    yield _at(stamped, "a node's parent does not come before it")
            case Fill() as it:
                yield from _uneven(stamped, it.positions, it.ids, it.pieces, it.confidences)
            case Mask() as it if not 0 <= it.allowed <= it.vocabulary:
                yield _at(stamped, f"{it.allowed} tokens are allowed in a vocabulary of {it.vocabulary}")
            case Cache() as it:
                yield from (_at(stamped, wrong) for wrong in _misstored(it))


def _uneven(stamped: Stamped, *columns: list[Any]) -> Iterator[str]:
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        yield _at(stamped, f"its lists have lengths {lengths}")


def _misstored(cache: Cache) -> Iterator[str]:
    if len(cache.live) not in (1, cache.layers) or any(len(layer) not in (1, cache.heads) for layer in cache.live):
        yield f"live slots are not given for {cache.layers} layers of {cache.heads} heads"
    for runs in (runs for layer in cache.live for runs in layer):
        edges = [edge for run in runs for edge in run]
        if (
            any(stop <= start for start, stop in runs)
            or edges != sorted(edges)
            or not all(0 <= e <= cache.length for e in edges)
        ):
            yield f"the runs {runs} are not ascending stretches of {cache.length} positions"
    for (gone, kept), runs in _merges(cache):
        if _held(gone, runs) or not _held(kept, runs):
            yield f"position {gone} was merged into {kept}, and what is live is {runs}"
    told = sum(1 for _ in _merges(cache))
    if cache.joined and not told == cache.merged <= cache.evicted:
        yield f"{told} merged slots are named, {cache.merged} were counted, and {cache.evicted} were freed"


def _merges(cache: Cache) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Every pair of positions of which one was merged into the other, with what is live in their layer and head."""
    for layer, live in zip(cache.joined, cycle(cache.live)):  # one layer or head may stand for all
        for pairs, runs in zip(layer, cycle(live)):
            yield from ((pair, runs) for pair in pairs)


def _held(position: int, runs: list[tuple[int, int]]) -> bool:
    return any(start <= position < stop for start, stop in runs)


def _probabilities(events: list[Stamped]) -> Iterator[str]:
    for stamped in events:
        wrong = [p for p in _chances(stamped.event) if not -ROUNDING <= p <= 1 + ROUNDING]
        if wrong:
            yield _at(stamped, f"{wrong[0]} is not a probability")


def _chances(event: Event) -> list[float]:
    """All numbers of an event that are probabilities; exp of a log-probability is one."""
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
        case Mask():
            return [event.banned, *_of_candidates(event.favourites)]
    return []


def _of_candidates(candidates: list[Candidate]) -> list[float]:
    return [number for candidate in candidates for number in (candidate.raw, candidate.final)]


def _finite(events: list[Stamped]) -> Iterator[str]:
    """JSON has neither NaN nor infinity, so a trace that holds one cannot be saved."""
    for stamped in events:
        if not _all_finite(stamped.to_json()):
            yield _at(stamped, "it holds a number that is not finite")


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


def _by_round(events: list[Stamped], kind: type[Draft] | type[Verdict]) -> dict[tuple[int, int], list[Stamped]]:
    found: dict[tuple[int, int], list[Stamped]] = {}
    for stamped in events:
        if isinstance(stamped.event, kind):
            found.setdefault(_round(stamped.event), []).append(stamped)
    return found


def _cut_short(events: list[Stamped]) -> bool:
    last = events[-1].event if events else None
    return not isinstance(last, Done) or last.reason in ("stopped", "failed")


def _at(stamped: Stamped, complaint: str) -> str:
    return f"event {stamped.seq} ({stamped.event.kind}): {complaint}"
