"""Runs made by hand for the live view, and how a test shows one."""
from __future__ import annotations

from dataclasses import asdict, replace

from live_page import choose, seek, send

from playground import events as ev
from playground.events import (
    Branches,
    Cache,
    Candidate,
    Commit,
    Done,
    Draft,
    Event,
    Forward,
    Header,
    Part,
    Stamped,
    Step,
    Verdict,
)
from playground.player.frames import frame, new_name
from playground.trace import Trace
from playground.trace.cache_contents import write_layers

Happened = list[tuple[float, Event]]
SHARED = {
    "model": "toy",
    "vocabulary": 100,
    "prompt": "one two",
    "prompt_ids": [1, 2, 3],
    "prompt_pieces": ["one", " ", "two"],
}
PLAIN = Header(0, "Greedy", strategy="greedy", parts=[Part("greedy", "decoder")], **SHARED)
GUESSING = Header(1, "Speculative", strategy="speculative", draft="small", **SHARED,
                  parts=[Part("speculative", "decoder"), Part("draft_model", "drafter"), Part("rejection", "verifier")])
WORDS = [" a", " b", " c", " d", " e"]


def commit(position: int, *origins: str) -> Commit:
    places = range(position, position + len(origins))
    return Commit(
        position,
        list(places),
        [WORDS[i] for i in places],
        "".join(WORDS[i] for i in places),
        [-0.5] * len(origins),
        list(origins),
    )


def step(position: int, entropy: float = 1.0, stream: str = "target") -> Step:
    return Step(position, entropy, entropy, position, [Candidate(position, WORDS[position], 0.5, 0.5)], stream)


def one_by_one(second: float = 0.1, length: int = 5) -> Happened:
    """Plain decoding: each forward takes half of its turn on the lane's clock."""
    events: Happened = []
    for i in range(length):
        forward = Forward(phase="decode" if i else "prefill", tokens=1 if i else 3, seconds=second / 2)
        events += [((i + 1) * second, event) for event in (forward, step(i), commit(i, "sampled"))]
    return [*events, (length * second, Done("length"))]


def in_rounds() -> Happened:
    """Two rounds of two draft tokens: both of the first are accepted, none of the second, which wastes two rows."""
    right, wrong = (
        [ev.Test(0, 0.75, 0.5, 0.25, True), ev.Test(1, 0.75, 0.5, 0.5, True)],
        [ev.Test(0, 0.125, 0.5, 0.875, False)],
    )
    left = [Candidate(4, " e", 0.5, 0.75), Candidate(9, " <b>", 0.25, 0.25)]
    return [
        (0.05, Forward(phase="prefill", tokens=3, seconds=0.04)),
        (0.05, step(0)),
        (0.05, commit(0, "sampled")),
        (0.06, Forward("draft", tokens=1, seconds=0.01)),
        (0.07, Forward("draft", tokens=1, seconds=0.01)),
        (0.07, Draft(0, [1, 2], WORDS[1:3], [-1, 0], [0.5, 0.5], "draft_model")),
        (0.15, Forward(tokens=3, seconds=0.06)),
        (0.15, Verdict(0, [0, 1], right, 3, " d", "bonus")),
        (0.15, step(1)),
        (0.15, step(2)),
        (0.15, step(3)),
        (0.15, commit(1, "draft", "draft", "bonus")),
        (0.15, Draft(1, [8, 9], [" x", " y"], [-1, 0], [0.5, 0.5], "draft_model")),
        (0.25, Forward(tokens=3, seconds=0.06)),
        (0.25, Verdict(1, [], wrong, 4, " e", "redraw", left)),
        (0.25, step(4)),
        (0.25, commit(4, "redraw")),
        (0.25, Done("length")),
    ]


def side_by_side() -> Happened:
    """Two sequences over three forwards; the first ends early and becomes the text."""
    events: Happened = [(0.1, Forward(phase="prefill", tokens=3, seconds=0.05)), (0.1, Branches([(1, 0), (2, 0)]))]
    for i, growing in enumerate([(1, 2), (1, 2), (2,), (2,)]):
        events += [((i + 1) / 10, Forward(tokens=len(growing), seconds=0.05))] * bool(i)
        events += [
            ((i + 1) / 10, replace(event, sequence=one)) for one in growing for event in (step(i), commit(i, "sampled"))
        ]
    return [*events, (0.4, replace(commit(0, "sampled", "sampled"), grown_on=1)), (0.4, Done("end"))]


def evicting(as_differences: bool = False) -> Happened:
    """Two layers of two heads: first everything is live, then sinks, a window, and one position of each head's own."""
    evicted = [["2 2+1", "2+1 1"], ["3+2", "2+2"]]
    live = [[[(0, 2), (3, 4), (6, 8)], [(0, 2), (4, 5), (6, 8)]], [[(0, 2), (2, 3), (6, 8)], [(0, 2), (5, 6), (6, 8)]]]
    return [(0.1, step(0)), (0.1, commit(0, "sampled")), (0.1, Cache("target", 4, 2, 2, [[[(0, 4)]]], bytes=800)),
            (0.2, Cache("target", 8, 2, 2, evicted=12, bytes=1000, dropped=write_layers(evicted)) if as_differences
             else Cache("target", 8, 2, 2, live, evicted=12, bytes=1000)), (0.2, Done("length"))]


def run_of(*lanes: tuple[Header, Happened]) -> Trace:
    headers = [replace(header, lane=lane) for lane, (header, _) in enumerate(lanes)]
    rows = sorted(
        ((at, lane, i, event) for lane, (_, events) in enumerate(lanes) for i, (at, event) in enumerate(events)),
        key=lambda row: row[:3],
    )
    return Trace(headers, [Stamped(lane, seq, at, event) for seq, (at, lane, _, event) in enumerate(rows)])


def send_trace(page, feed, trace: Trace, state: str = "done") -> None:
    """The whole run with the player at its end; an unfinished one is followed."""
    run = frame(
        new_name(),
        0,
        [stamped.to_json() for stamped in trace.events],
        state,
        [asdict(header) for header in trace.headers],
    )
    send(page, feed, run)
    if state == "done":
        seek(page, 1.0)


def show(page, feed, trace: Trace, lane: int = 0, state: str = "done") -> None:
    """`send_trace`, with one of the lanes chosen."""
    send_trace(page, feed, trace, state)
    if len(trace.headers) > 1:
        choose(page, lane)
    settle(page)


def settle(page) -> None:
    """Wait until the views show the player's position; during playback they pause between two drawings."""
    page.wait_for_timeout(100)
    page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() =>"
        " requestAnimationFrame(done))))"
    )


def totals(page) -> dict[str, list[str]]:
    """Time, share, forwards and rows by worker, of the lane drawn large."""
    rows = page.locator(".panel-cost .large .totals tr").evaluate_all(
        "rows => rows.slice(1).map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    return {name: numbers for name, *numbers in rows}


def key_of(page, view: str) -> list[str]:
    return page.locator(f".panel-{view} .chart-key > span").all_inner_texts()
