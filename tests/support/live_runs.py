"""Runs for the live view, hostile texts among them."""
from __future__ import annotations

import math
from dataclasses import asdict

from playground import events as ev
from playground.events import (
    Cache,
    Candidate,
    Commit,
    Done,
    Draft,
    Failed,
    Figure,
    Forward,
    Header,
    Mask,
    Note,
    Part,
    Stamped,
    Step,
    Switch,
    Verdict,
)
from playground.trace import Trace

HOSTILE = "<img src=x onerror=window.hacked=1>"


def candidates(chosen: str, fallen: str) -> list[Candidate]:
    return [
        Candidate(7, chosen, 0.5, 0.75),
        Candidate(8, " other", 0.25, 0.25),
        Candidate(9, fallen, 0.125, 0.0, "mask"),
    ]


def step(position: int, entropy: float, piece: str = " a") -> Step:
    return Step(position, entropy, entropy / 2, 7, candidates(piece, HOSTILE))


def commit(position: int, *tokens: tuple[str, str]) -> Commit:
    pieces = [piece for piece, _ in tokens]
    logprobs = [None if origin == "forced" else -math.log(2) for _, origin in tokens]
    return Commit(
        position, list(range(7, 7 + len(tokens))), pieces, "".join(pieces), logprobs, [origin for _, origin in tokens]
    )


def under_a_grammar() -> list:
    """(seconds, event), one token at a time; two tokens are forced."""
    favourite = Candidate(9, HOSTILE, 0.375, 0.0, "mask")
    return [
        (0.1, Forward(phase="prefill", tokens=3)),
        (0.1, Mask(0, 12, 100, 0.375, [favourite], state="open")),
        (0.1, step(0, 1.0, HOSTILE)),
        (0.1, commit(0, (HOSTILE, "sampled"))),
        (0.2, Mask(1, 1, 100, 0.5, [], forced=[7, 8])),
        (0.2, commit(1, ("\n", "forced"), (" b", "forced"))),
        (0.3, Forward(phase="catch_up", tokens=3)),
        (0.4, Mask(3, 40, 100, 0.25, [favourite], accepting=True)),
        (0.4, step(3, 3.0)),
        (0.4, commit(3, ("<|end|>", "sampled"))),
        (0.4, Done("end")),
    ]


def speculating() -> list:
    """A tree of four draft tokens: path 0, 2 is accepted, 1 rejected, 3 not tested; then a chain rejected at once."""
    tree = Draft(
        0,
        [7, 20, 8, 21],
        [" a", " x", " b", " y"],
        [-1, -1, 0, 1],
        [0.5, 0.25, 0.5, 0.75],
        "draft_model",
        "without_replacement",
    )
    tests = [ev.Test(1, 0.01, 0.25, 0.9, False), ev.Test(0, 0.5, 0.5, 0.125, True), ev.Test(2, 0.75, 0.5, 0.25, True)]
    chain = Draft(1, [30], [" z"], [-1], [0.875], "draft_model")
    return [
        (0.1, Forward(phase="prefill", tokens=3)),
        (0.1, step(0, 2.0)),
        (0.1, commit(0, (" s", "sampled"))),
        (0.1, Cache("target", 3, 2, 2, [[[(0, 3)], [(0, 3)]], [[(0, 3)], [(0, 3)]]], bytes=96)),
        (0.12, Forward("draft")),
        (0.14, Forward("draft")),
        (0.14, tree),
        (0.2, Forward(tokens=5)),
        (0.2, Verdict(0, [0, 2], tests, 9, " c", "bonus")),
        (0.2, step(1, 0.5)),
        (0.2, step(2, 0.25)),
        (0.2, step(3, 1.25)),
        (0.2, commit(1, (" a", "draft"), (" b", "draft"), (" c", "bonus"))),
        (
            0.2,
            Cache(
                "target", 6, 2, 2, [[[(0, 1), (4, 6)], [(0, 6)]], [[(2, 6)], [(5, 6)]]], scratch=5, evicted=9, bytes=160
            ),
        ),
        (0.25, Forward("draft")),
        (0.25, chain),
        (0.3, Forward(tokens=2)),
        (0.3, Verdict(1, [], [ev.Test(0, 0.0, 0.875, 0.5, False)], 7, " r", "redraw", [Candidate(7, " r", 0.5, 0.75)])),
        (0.3, step(4, 0.75)),
        (0.3, commit(4, (" r", "redraw"))),
        (0.3, Note("One draft token was rejected.")),
        (0.3, Figure("scalar", "surprise", {"x": 4, "series": {"mu": 2.5}, "lines": {"tau": 3.0}})),
        (0.3, Switch(5, "draft", "sure enough")),
        (0.3, Done("length")),
    ]


def headers() -> list[Header]:
    shared = {
        "model": "toy",
        "vocabulary": 100,
        "prompt": "one two",
        "prompt_ids": [1, 2, 3],
        "prompt_pieces": ["one", " ", "two"],
    }
    return [
        Header(
            0, "Schema", parts=[Part("greedy", "decoder")], strategy="greedy", guarantee=["constraint_sound"], **shared
        ),
        Header(
            1,
            "Speculative",
            parts=[Part("draft_model", "drafter", {"depth": 2})],
            guarantee=["greedy_identical"],
            **shared,
        ),
        Header(2, "Broken", guarantee=["heuristic"], reconstruction=True, **shared),
    ]


def whole_run() -> Trace:
    happened = [(0, under_a_grammar()), (1, speculating()), (2, [(0.0, Failed("Choose another draft model."))])]
    rows = sorted(
        ((at, lane, i, event) for lane, events in happened for i, (at, event) in enumerate(events)),
        key=lambda row: row[:3],
    )
    return Trace(headers(), [Stamped(lane, seq, at, event) for seq, (at, lane, _, event) in enumerate(rows)])


RUN = whole_run()
HEADERS = [asdict(header) for header in RUN.headers]
EVENTS = [stamped.to_json() for stamped in RUN.events]
