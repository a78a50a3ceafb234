"""A sequence: one growing text with its grammar, sampler and decoder state.

Number 0 is the lane's own text. Others are forked from it or from each other, grow in parallel and share the KV cache
of their common prefixes. One of them may become the lane's text.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from playground.contract.token_tree import ROOT
from playground.errors import Refusal
from playground.events import Origin, Reason

if TYPE_CHECKING:
    from playground.decoding.sampler_chain import Chain
    from playground.engine.text.token_bytes import Reader
    from playground.engine.text.tokens import Tokens


class SpeaksTokens(Protocol):
    """What ends a text of a model, one that continues texts or one that fills canvases."""

    tokens: Tokens

    @property
    def end_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Bounds:
    """What ends a text."""

    most: int  # maximum number of tokens, prompt included
    end_ids: frozenset[int]
    stop: tuple[str, ...] = ()
    named: tuple[str, ...] = ()  # those of `stop` with the name of a special token, which is no part of the text

    @classmethod
    def of(cls, most: int, model: SpeaksTokens, stop: tuple[str, ...]) -> Bounds:
        """The bounds of a text of this model."""
        return cls(most, model.end_ids, stop, tuple(text for text in stop if model.tokens.special_in(text)))


class Sequence:
    def __init__(self, number: int, prompt: list[int], bounds: Bounds, chain: Chain, reader: Reader):
        self.number, self.bounds, self.chain, self.reader = number, bounds, chain, reader
        self.tokens = list(prompt)  # everything committed, prompt included
        self.start = len(prompt)
        self.text = ""
        self.named = ""  # the same with the names of special tokens, if a stop string has one
        self.reason: Reason | None = None  # why it is complete
        self.logprobs: list[float | None] = []
        self.origins: list[Origin] = []
        chain.follow(self)
        # its node in the lane's tree of branches, and the number of tokens up to that node
        self.node, self.placed = ROOT, len(prompt)

    def fork(self, number: int) -> Sequence:
        """An independent copy of this sequence with another number."""
        child = Sequence(number, self.tokens, self.bounds, self.chain.fork(), self.reader.copy())
        child.start, child.text, child.named, child.reason = self.start, self.text, self.named, self.reason
        child.node, child.placed = self.node, self.placed
        child.logprobs, child.origins = list(self.logprobs), list(self.origins)
        return child

    @property
    def lineage(self) -> int:
        """Key of its random numbers: the first fork uses those of the lane, every other one has its own."""
        return max(0, self.number - 1)

    @property
    def written(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.start:]

    @property
    def generated(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.tokens) - self.start

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.bounds.most - len(self.tokens)

    def extend(self, tokens: list[int]) -> tuple[int, str]:
        """Append tokens until the text is complete.

        Returns how many were appended and the text that became readable. Raises Refusal for a token that the grammar
        does not allow.
        """
        count, before = 0, len(self.text)
        while count < len(tokens) and not self.reason:
            self._append(tokens[count])
            count += 1
        return count, self.text[before:]

    def _append(self, token: int) -> None:
        matcher = self.chain.matcher
        if matcher and not matcher.advance(token):
            raise Refusal(
                f"The grammar does not allow {self.reader.piece(token)!r} here, so the text cannot continue: "
                "loosen the grammar.",
                "constraint",
            )
        self.tokens.append(token)
        self._show(token)
        self.reason = self._complete(token)

    def _show(self, token: int) -> None:
        piece = self.reader.push([token])
        self.text += piece
        if self.bounds.named:
            self.named += self.reader.piece(token) if self.reader.is_special(token) else piece

    def finish(self) -> str:
        """Flush the bytes of an incomplete last character; returns their text."""
        rest = self.reader.flush()
        self.text += rest
        return rest

    def take_back(self, count: int) -> None:
        """Remove the last `count` tokens."""
        del self.tokens[len(self.tokens) - count:]
        if self.chain.matcher:
            self.chain.matcher.rollback(count)
        self.reader.rebuild(())
        self.text, self.named, self.reason = "", "", None
        for token in self.written:
            self._show(token)

    def _complete(self, token: int) -> Reason | None:
        if token in self.bounds.end_ids:
            return "end"
        if any(stop in self.text for stop in self.bounds.stop if stop):
            return "stop_string"
        if any(stop in self.named for stop in self.bounds.named):
            return "stop_string"
        if self._grammar_complete():
            return "grammar"
        return "length" if self.remaining <= 0 else None

    def _grammar_complete(self) -> bool:
        """Whether the grammar allows only the end.

        A decoder to which probabilities count commits the end token too.
        """
        ends_here = self.chain.forcing or not self.bounds.end_ids
        return bool(ends_here and self.chain.matcher and self.chain.matcher.stopped)
