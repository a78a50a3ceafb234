"""A sequence: one text that grows, with all that moves along with it.

Number 0 is the lane's own text. Others are forked from it or from each other, grow side by side, share the cache of
what they have in common, and one of them may become the lane's text.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from playground.contract.token_tree import ROOT
from playground.events import Reason

if TYPE_CHECKING:
    from playground.decoding.sampler_chain import Chain
    from playground.engine.tokens import Reader


@dataclass(frozen=True)
class Bounds:
    """What ends a text."""

    most: int  # tokens, prompt included
    end_ids: frozenset[int]
    stop: tuple[str, ...] = ()


class Sequence:
    def __init__(self, number: int, prompt: list[int], bounds: Bounds, chain: Chain, reader: Reader):
        self.number, self.bounds, self.chain, self.reader = number, bounds, chain, reader
        self.tokens = list(prompt)  # everything committed, prompt included
        self.start = len(prompt)
        self.text = ""
        self.reason: Reason | None = None  # why it ended
        self.logprobs: list[float | None] = []
        self.origins: list[str] = []
        chain.follow(self)
        # its leaf in the lane's tree of branches, and how many tokens stand there or before
        self.node, self.placed = ROOT, len(prompt)

    def fork(self, number: int) -> Sequence:
        """A sequence at the same place that goes its own way."""
        twin = Sequence(number, self.tokens, self.bounds, self.chain.fork(), self.reader.copy())
        twin.start, twin.text, twin.reason, twin.node, twin.placed = (
            self.start,
            self.text,
            self.reason,
            self.node,
            self.placed,
        )
        twin.logprobs, twin.origins = list(self.logprobs), list(self.origins)
        return twin

    @property
    def lineage(self) -> int:
        """Whose chances it takes: the first branch takes the lane's own, every other has its own."""
        return max(0, self.number - 1)

    @property
    def written(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.start:]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.start

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.bounds.most - len(self.tokens)

    def append(self, token: int) -> str:
        """Write one token; returns the text that became readable. The grammar has let it through already."""
        self.tokens.append(token)
        piece = self.reader.push([token])
        self.text += piece
        self.reason = self._complete(token)
        return piece

    def finish(self) -> str:
        """What was still waiting for the rest of its letter."""
        rest = self.reader.flush()
        self.text += rest
        return rest

    def take_back(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count:]
        if self.chain.matcher:
            self.chain.matcher.rollback(count)
        self.text, self.reason = self.reader.rebuild(self.written), None

    def _complete(self, token: int) -> Reason | None:
        if token in self.bounds.end_ids:
            return "end"
        if any(stop in self.text for stop in self.bounds.stop if stop):
            return "stop_string"
        if self._nothing_follows():
            return "grammar"
        return "length" if self.remaining <= 0 else None

    def _nothing_follows(self) -> bool:
        """Whether the grammar leaves nothing but the end. A decoder that owns the grammar writes the end itself: its
        chance counts too.
        """
        written_out = self.chain.masking or not self.bounds.end_ids
        return bool(written_out and self.chain.matcher and self.chain.matcher.stopped)
