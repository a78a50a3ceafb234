"""The texts of a lane, reconstructed from its Commits and Rollbacks alone.

Sequence 0 is the text of the lane and starts empty. Any other sequence starts as a copy of its parent at the Branches
event that lists it. A Commit with `grown_on` copies what was recorded on that sequence. Imports neither torch nor
gradio.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from playground.events import Branches, Commit, Origin, Rollback, Stamped, Step


class Token(NamedTuple):
    """One token of a text."""

    id: int
    piece: str
    logprob: float | None
    origin: Origin | None
    seq: int  # of the Commit that first wrote it, on whichever sequence


@dataclass
class Written:
    """One sequence: its tokens, the readable text so far, and the Step of each position that has one."""

    tokens: list[Token] = field(default_factory=list)
    text: str = ""
    steps: dict[int, Step] = field(default_factory=dict)

    def copy(self) -> Written:
        return Written(list(self.tokens), self.text, dict(self.steps))

    def add(self, commit: Commit, seq: int) -> None:
        self.text += commit.text
        for i, token in enumerate(commit.ids):
            piece, logprob, origin = _at(commit.pieces, i), _at(commit.logprobs, i), _at(commit.origins, i)
            self.tokens.append(Token(token, piece, logprob, origin, seq))

    def inherit(self, source: Written, commit: Commit) -> None:
        """Copy the Steps, and the `seq` of each token, from `source`, where the tokens of `commit` were generated."""
        for position in range(max(0, commit.position), min(len(self.tokens), len(source.tokens))):
            if self.tokens[position].id == source.tokens[position].id:
                self.tokens[position] = self.tokens[position]._replace(seq=source.tokens[position].seq)
            if position in source.steps:
                self.steps[position] = source.steps[position]

    def take_back(self, rollback: Rollback) -> None:
        """Remove the last tokens and their Steps."""
        self.text = rollback.text
        del self.tokens[max(0, len(self.tokens) - rollback.count):]
        self.steps = {position: step for position, step in self.steps.items() if position < len(self.tokens)}


def sequences(events: Iterable[Stamped]) -> dict[int, Written]:
    """Every sequence of one lane after its last event. Sequence 0 always exists."""
    found = {0: Written()}
    for stamped in events:
        advance(found, stamped)
    return found


def advance(found: dict[int, Written], stamped: Stamped) -> None:
    """Apply one more event to the sequences found so far."""
    match stamped.event:
        case Branches(born=born):
            found.update({child: found.get(parent, Written()).copy() for child, parent in born})
        case Step() as step:
            found.setdefault(step.sequence, Written()).steps[step.position] = step
        case Commit() as commit:
            written = found.setdefault(commit.sequence, Written())
            written.add(commit, stamped.seq)
            if commit.grown_on and commit.grown_on in found:  # 0: the tokens were generated on the lane's own text
                written.inherit(found[commit.grown_on], commit)
        case Rollback() as rollback:
            found.setdefault(rollback.sequence, Written()).take_back(rollback)


def _at(column: list[Any], i: int) -> Any:
    """Entry i; None if an inconsistent Commit has too few, so that `check` can still report the rest."""
    return column[i] if i < len(column) else None
