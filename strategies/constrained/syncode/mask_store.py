"""The mask store of SynCode: which tokens may follow inside a terminal, and across its end into the next one.

A lookup takes a terminal, the state of its automaton and the terminal after it, and covers the whole vocabulary at
once. A token that extends beyond those two terminals is left undecided.
"""
from __future__ import annotations

from functools import cache
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from playground.errors import Refusal
from playground.grammar import limits
from playground.grammar.client import ContentCache, digest_of
from playground.grammar.lark.byte_dfa import DEAD, DFA


class Lookup(NamedTuple):
    """Tokens [V]: certainly allowed, and those that extend beyond both terminals."""

    sure: Tensor
    undecided: Tensor


class StoredMasks:
    """The masks of one grammar and one tokenizer, shared by the runs that use both."""

    def __init__(self, spelled: list[bytes]):
        self.lengths = torch.tensor([len(text) for text in spelled])
        # [V, longest]
        self.bytes = pad_sequence(
            [torch.tensor(list(text) or [0], dtype=torch.uint8) for text in spelled], batch_first=True
        )
        self.entries: dict[tuple[str, int, str | None], Lookup] = {}

    @property
    def size(self) -> int:
        """Bytes in memory: two masks for each entry, of one byte a token."""
        return self.bytes.numel() + (8 + 2 * len(self.entries)) * len(self.lengths)


def stored(source: str, spelled: list[bytes]) -> StoredMasks:
    """The masks of a grammar and a vocabulary, from an earlier run of this process if there was one."""
    vocabulary = blake2b(repr(spelled).encode(), digest_size=16).hexdigest()
    return _stores().get(digest_of(source, vocabulary), lambda: StoredMasks(spelled))


@cache
def _stores() -> ContentCache:
    return ContentCache(limits.STORES, limits.STORE_BYTES, lambda masks: masks.size)


class MaskStore:
    """One run's view of the stored masks. Entries are computed on first lookup and cached. Raises Refusal
    if they take too much time or memory.
    """

    def __init__(self, masks: StoredMasks, automata: dict[str, DFA]):
        self.automata = automata
        self.lengths, self.bytes, self.entries = masks.lengths, masks.bytes, masks.entries
        self.most_entries = limits.STORE_BYTES // (2 * len(self.lengths))  # two masks each, of one byte a token
        self.used: set[tuple[str, int, str | None]] = set()  # entries used by this run
        self.walked = 0  # bytes of tokens that were walked over in this step
        self._first: tuple = ()  # the last walk through a first terminal, shared by all that may follow it

    def begin_step(self) -> None:
        self.walked = 0

    def inside(self, terminal: str, state: int) -> Tensor:
        """Tokens that stay within a terminal from a state on, [V]."""
        return self._entry(terminal, state, None).sure

    def then(self, terminal: str, state: int, following: str) -> Lookup:
        """Tokens that complete a terminal, perhaps after some more bytes of it, and continue with the next one."""
        return self._entry(terminal, state, following)

    def _entry(self, terminal: str, state: int, following: str | None) -> Lookup:
        key = (terminal, state, following)
        self.used.add(key)
        if key not in self.entries:
            self._check()
            self.entries[key] = self._made(*key)
        return self.entries[key]

    def _check(self) -> None:
        if self.walked > limits.STEP_BYTES or len(self.entries) >= self.most_entries:
            what = "memory" if len(self.entries) >= self.most_entries else "time for one step"
            raise Refusal(
                f"The lookups of this grammar take too much {what}: give it fewer terminals, or use lark in place of"
                " syncode.",
                "constraint",
            )

    def _made(self, terminal: str, state: int, following: str | None) -> Lookup:
        stops, states = self._walk_first(terminal, state)
        whole = (stops == self.lengths) & (self.lengths > 0)
        if following is None:
            return Lookup(whole, torch.zeros_like(whole))
        left = ~whole & (self.lengths > 0) & self._final(terminal, states)
        ends, beyond = self._walk(following, 0, torch.where(left, stops, self.lengths))
        return Lookup(
            left & (ends == self.lengths),
            left & (ends > stops) & (ends < self.lengths) & self._final(following, beyond),
        )

    def _walk_first(self, terminal: str, state: int) -> tuple[Tensor, Tensor]:
        if self._first[:2] != (terminal, state):
            self._first = (terminal, state, self._walk(terminal, state, torch.zeros_like(self.lengths)))
        return self._first[2]

    def _walk(self, terminal: str, state: int, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Where each token, read from an offset on, leaves the automaton or ends, and the state there, [V] each.
        """
        table, _ = self.automata[terminal].tensors
        at, states, going = starts.clone(), torch.full_like(starts, state), (starts < self.lengths).nonzero()[:, 0]
        while len(going):
            self.walked += len(going)
            following = table[states[going], self.bytes[going, at[going]].long()]
            going, following = going[following != DEAD], following[following != DEAD]
            states[going] = following
            at[going] += 1
            going = going[at[going] < self.lengths[going]]
        return at, states

    def _final(self, terminal: str, states: Tensor) -> Tensor:
        return self.automata[terminal].tensors[1][states]
