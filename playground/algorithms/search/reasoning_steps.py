"""Sequences that grow by one reasoning step at a time, side by side.

A step ends after a line, after a paragraph, after a number of tokens, or with the text. The row after a step is read at
its end: its hidden state is what a reward judges, and the next step begins with it, so nothing is read twice.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from playground.contract import RewardedText

if TYPE_CHECKING:
    from torch import Tensor

    from playground.contract import Lane
    from playground.decoding.rows import Rows
    from playground.decoding.sequence import Sequence

DELIMITERS = {"line": "\n", "paragraph": "\n\n"}


@dataclass(eq=False)
class Reasoning:
    """A sequence at the end of a step."""

    leaf: Sequence
    row: Rows | None = None  # after its last token; None if that was not read
    logp: float = 0.0  # of its generated tokens under the unmodified model, in nats
    state: Tensor | None = None  # input of the lm_head after its last token that does not end the text
    way: str = ""  # distinguishes the random numbers of several continuations of one row; "" for the first

    @property
    def text(self) -> RewardedText:
        return RewardedText(self.leaf.tokens, self.logp, self.state)

    def continued(self, lm: Lane, count: int) -> list[Reasoning]:
        """Copies that continue it: the first in its own sequence, the others in forks."""
        leaves = [self.leaf, *(lm.fork(count - 1, self.leaf) if count > 1 else [])]
        ways = ["", *(f" {number}" for number in range(2, count + 1))]
        return [Reasoning(leaf, self.row, self.logp, self.state, way) for leaf, way in zip(leaves, ways)]


@dataclass(frozen=True)
class StepEnd:
    """What ends a step: a delimiter in its text, or a number of tokens."""

    delimiter: str
    most: int

    def reached(self, text: str, tokens: int) -> bool:
        return tokens >= self.most or (self.delimiter in text.lstrip("\n"))


def take_step(lm: Lane, growing: list[Reasoning], end: StepEnd) -> Iterator:
    """Sample one step of each unfinished sequence, in as many forwards as the longest step has tokens.

    Every sequence then has the row after its step, unless its text is complete. Returns the tokens sampled.
    """
    begun = {id(each): (len(each.leaf.text), each.leaf.generated) for each in growing}
    before = sum(count for _, count in begun.values())
    active = [each for each in growing if not each.leaf.reason]
    while active:
        yield from _read(lm, [each for each in active if each.row is None])
        active = [each for each in active if not _ended(each, end, *begun[id(each)])]
        if active:
            yield lm.keep([_chosen(lm, each) for each in active])
            active = [each for each in active if not each.leaf.reason]
    return sum(each.leaf.generated for each in growing) - before


def _read(lm: Lane, unread: list[Reasoning]) -> Iterator:
    if not unread:
        return
    rows = yield lm.extend([each.leaf for each in unread])
    for each, row in zip(unread, rows):
        each.row, each.state = row, None if row.hidden is None else row.hidden[0]


def _ended(each: Reasoning, end: StepEnd, characters: int, tokens: int) -> bool:
    count = each.leaf.generated - tokens
    return count > 0 and end.reached(each.leaf.text[characters:], count)


def _chosen(lm: Lane, each: Reasoning):
    """The next token of a sequence. The state before an end token is that of the complete text."""
    row, each.row = each.row, None
    token = lm.pick(row, purpose=f"token{each.way}").token
    each.logp, each.way = each.logp + float(row.logp[0, token]), ""
    if not lm.ends(token):
        each.state = None
    return lm.choose(row, token, leaf=each.leaf)
