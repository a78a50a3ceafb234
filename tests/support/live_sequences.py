"""Runs with many sequences for the live view."""
from __future__ import annotations

from playground.events import Branches, Candidate, Commit, Done, Event, Fill, Forward, Header, Stamped, Step
from playground.trace import Trace


def grown(sequence: int, position: int, piece: str, entropy: float = 1.0) -> list[Event]:
    """One token of one sequence, with its step."""
    top = [Candidate(ord(piece[-1]), piece, 0.5, 0.5), Candidate(7, " other", 0.25, 0.25)]
    thought = Step(position, entropy, entropy, ord(piece[-1]), top, sequence=sequence)
    return [thought, Commit(position, [ord(piece[-1])], [piece], piece, [-0.5], ["sampled"], sequence=sequence)]


def three_beams() -> list[tuple[float, Event]]:
    """Sequence 3 is dropped for a child of 1; 1 ends; 2 has the best score in the end and becomes the text."""
    rounds = [
        [
            Forward(phase="prefill", tokens=3),
            Branches([(1, 0), (2, 0), (3, 0)]),
            *grown(1, 0, " a"),
            *grown(2, 0, " b", 2.0),
            *grown(3, 0, " c"),
            Branches(scores={1: -1.0, 2: -1.5, 3: -2.5}),
        ],
        [
            Forward(tokens=3),
            Branches([(4, 1)], [3]),
            *grown(1, 1, " d"),
            *grown(2, 1, " e", 3.0),
            *grown(4, 1, " f"),
            Branches(scores={1: -1.25, 2: -1.75, 4: -2.75}),
        ],
        [
            Forward(tokens=3),
            *grown(1, 2, " i"),
            *grown(2, 2, " g", 4.0),
            *grown(4, 2, " h"),
            Branches(ended=[1], scores={1: -3.0, 2: -2.0, 4: -3.5}),
        ],
        [
            Commit(0, [ord(c) for c in "beg"], [" b", " e", " g"], " b e g", [-0.5] * 3, ["sampled"] * 3, grown_on=2),
            Done("length"),
        ],
    ]
    return [((number + 1) / 10, event) for number, events in enumerate(rounds) for event in events]


def filling() -> list[tuple[float, Event]]:
    """Four positions in three steps, the most certain first."""
    return [
        (0.1, Forward(tokens=4)),
        (0.1, Fill([2], [13], [" c"], [0.9], [0.4])),
        (0.2, Forward(tokens=4)),
        (0.2, Fill([0, 3], [11, 14], [" a", " d"], [0.7, 0.4], [1.0, 2.2])),
        (0.3, Forward(tokens=4)),
        (0.3, Fill([1], [12], [" b"], [1.0], [0.0])),
        (0.4, Commit(0, [11, 12, 13, 14], [" a", " b", " c", " d"], " a b c d", [None] * 4, ["sampled"] * 4)),
        (0.4, Done("end")),
    ]


def run_of(*lanes: tuple[Header, list[tuple[float, Event]]]) -> Trace:
    rows = sorted(
        ((at, header.lane, i, event) for header, events in lanes for i, (at, event) in enumerate(events)),
        key=lambda row: row[:3],
    )
    return Trace(
        [header for header, _ in lanes],
        [Stamped(lane, seq, at, event) for seq, (at, lane, _, event) in enumerate(rows)],
    )


def lane(number: int, events: list[tuple[float, Event]], **facts) -> tuple[Header, list[tuple[float, Event]]]:
    return Header(
        number,
        f"Lane {number}",
        vocabulary=300,
        prompt="Say",
        prompt_ids=[1, 2, 3],
        prompt_pieces=["S", "a", "y"],
        **facts,
    ), events


BEAMS = run_of(lane(0, three_beams()))
