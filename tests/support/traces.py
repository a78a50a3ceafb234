"""Traces made by hand. Event i happens at second i unless a test gives other times."""
from __future__ import annotations

from dataclasses import replace

from playground import events as ev
from playground.events import (
    Branches,
    Cache,
    Candidate,
    Commit,
    Done,
    Draft,
    Failed,
    Figure,
    Fill,
    Forward,
    Header,
    Mask,
    Note,
    Part,
    Rollback,
    Stamped,
    Step,
    Switch,
    Verdict,
)
from playground.trace import Trace


def stamp(*events, lane=0, at=None):
    return [Stamped(lane, i, float(i) if at is None else at[i], event) for i, event in enumerate(events)]


def trace(*events, at=None):
    return Trace([Header(vocabulary=100)], stamp(*events, at=at))


def commit(position, ids, origins=None, **changes):
    pieces = [f" {token}" for token in ids]
    origins = origins or ["sampled"] * len(ids)
    return replace(Commit(position, list(ids), pieces, "".join(pieces), [-0.5] * len(ids), list(origins)), **changes)


def draft(number, tokens, parents=None, **changes):
    parents = parents or list(range(-1, len(tokens) - 1))
    return replace(
        Draft(number, list(tokens), [f" {t}" for t in tokens], parents, [0.5] * len(tokens), "model"), **changes
    )


def verdict(number, kept, token, tests=(), **changes):
    looked_at = [ev.Test(node, 0.4, 0.5, 0.3, node in kept) for node in tests]
    return replace(Verdict(number, list(kept), looked_at, token, f" {token}"), **changes)


def prefill(tokens=5, **changes):
    return replace(Forward("target", "prefill", tokens), **changes)


def greedy(*ids, end="length"):
    """Plain decoding: prefill, then one forward with one row for every token except the first."""
    first, *others = (commit(i, [token]) for i, token in enumerate(ids))
    return trace(prefill(), first, *(event for other in others for event in (Forward(), other)), Done(end))


def speculative():
    """Two rounds of three draft tokens: two are accepted, then one; the last token is fed along with each tree."""
    return trace(
        prefill(), commit(0, [10]),
        Forward("draft", "catch_up", 6), Forward("draft"), Forward("draft"), draft(0, [11, 12, 13]), Forward(tokens=4),
        verdict(0, [0, 1], 20, tests=[0, 1, 2], origin="redraw"), commit(1, [11, 12, 20], ["draft", "draft", "redraw"]),
        Forward("draft", tokens=2), Forward("draft"), draft(1, [21, 22], [-1, -1]), Forward(tokens=3),
        verdict(1, [1], 23, tests=[0, 1]), commit(4, [22, 23], ["draft", "bonus"]),
        Done("length"))


def everything():
    """Two lanes and every kind of event with fields of every type."""
    candidate = Candidate(3, " ü", 0.25, 0.0, "top_k")
    first = [
        prefill(seconds=0.01, flops=2e9),
        Switch(to="large", why="uncertain"),
        Note("Here the model hesitates."),
        Step(0, 1.5, 0.7, 3, [candidate]),
        Mask(0, 7, 100, 0.2, [candidate], [4], True, "start", 1e-5),
        commit(0, [3, 4]),
        Branches([(1, 0)], [], {0: -1.5, 1: -2.0}),
        commit(2, [5], sequence=1),
        Branches(dropped=[1]),
        draft(0, [6, 7], [-1, -1]),
        verdict(0, [1], 8, tests=[0, 1], leftover=[candidate]),
        commit(2, [7, 8]),
        Rollback(1, " 3 4 7"),
        Cache("target", 9, 2, 1, [[[(0, 4), (6, 9)]], [[(0, 9)]]], 3, 2, 1, 4096),
        Fill([0], [1], ["x"], [0.9]),
        Figure("bars", "votes", {"labels": ["a"], "values": [1]}),
        Done("end"),
    ]
    headers = [
        Header(0, "Greedy", "pocket", parts=[Part("top_p", "sampler", {"p": 0.9})], stop=["\n"], prompt_ids=[1]),
        Header(1),
    ]
    second = [Stamped(1, 100 + i, i / 4, event) for i, event in enumerate([commit(0, [3]), Failed("Choose a model.")])]
    return Trace(headers, [*stamp(*first), *second])
