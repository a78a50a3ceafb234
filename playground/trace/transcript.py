"""What a lane wrote, rebuilt from its Commits and Rollbacks alone.

Sequence 0 is the text of the lane and begins empty. Another sequence begins as a copy of its parent at the moment
Branches tells of its birth. A Commit that says where its tokens grew brings along what was noted there. Imports neither
torch nor gradio.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from playground.events import Branches, Commit, Origin, Rollback, Stamped, Step


class Token(NamedTuple):
    """One token that stands in a text."""

    id: int
    piece: str
    logprob: float | None
    origin: Origin | None
    seq: int  # of the Commit that first wrote it, on whichever sequence


@dataclass
class Written:
    """One sequence: its tokens, the text that is readable so far, and the Step behind each position where there was
    one.
    """

    tokens: list[Token] = field(default_factory=list)
    text: str = ""
    steps: dict[int, Step] = field(default_factory=dict)

    def copy(self) -> Written:
        return Written(list(self.tokens), self.text, dict(self.steps))

    def add(self, commit: Commit, seq: int) -> None:
        self.text += commit.text
        columns = commit.pieces, commit.logprobs, commit.origins
        for i, token in enumerate(commit.ids):
            self.tokens.append(Token(token, *(_at(column, i) for column in columns), seq))

    def inherit(self, source: Written, commit: Commit) -> None:
        """What was noted while the tokens of `commit` grew on `source` is noted here too; they were first written
        there.
        """
        for position in range(max(0, commit.position), min(len(self.tokens), len(source.tokens))):
            if self.tokens[position].id == source.tokens[position].id:
                self.tokens[position] = self.tokens[position]._replace(seq=source.tokens[position].seq)
            if position in source.steps:
                self.steps[position] = source.steps[position]

    def take_back(self, rollback: Rollback) -> None:
        """Thoughts about the positions that were taken back go with them."""
        self.text = rollback.text
        del self.tokens[max(0, len(self.tokens) - rollback.count):]
        self.steps = {position: step for position, step in self.steps.items() if position < len(self.tokens)}


def sequences(events: Iterable[Stamped]) -> dict[int, Written]:
    """Every sequence of one lane as its last event left it; sequence 0 is always there."""
    found = {0: Written()}
    for stamped in events:
        advance(found, stamped)
    return found


def advance(found: dict[int, Written], stamped: Stamped) -> None:
    """Bring the sequences found so far up to date with one more event."""
    match stamped.event:
        case Branches(born=born):
            found.update({child: found.get(parent, Written()).copy() for child, parent in born})
        case Step() as step:
            found.setdefault(step.sequence, Written()).steps[step.position] = step
        case Commit() as commit:
            written = found.setdefault(commit.sequence, Written())
            written.add(commit, stamped.seq)
            if commit.grown_on and commit.grown_on in found:  # 0, the lane's own text, stands for nowhere else
                written.inherit(found[commit.grown_on], commit)
        case Rollback() as rollback:
            found.setdefault(rollback.sequence, Written()).take_back(rollback)


def _at(column: list[Any], i: int) -> Any:
    """Entry i; None where a broken Commit has too few, so that a check can still speak about the rest."""
    return column[i] if i < len(column) else None
