"""The mask store of SynCode: which tokens may follow inside a terminal, and across its end into the next one.

A lookup takes a terminal, the state of its automaton and the terminal after it, and covers the whole vocabulary at
once. A token that extends beyond those two terminals is left undecided.
"""
from __future__ import annotations

from collections.abc import Mapping
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

CHECKED, BANNED = "checked", "banned"  # what happens to undecided tokens
CONFIRMS, COMPARES = "confirms", "compares"  # what the exact engine does

class Lookup(NamedTuple):
    """Tokens [V]: certainly allowed, and those that extend beyond both terminals."""

    sure: Tensor
    undecided: Tensor


class Walk(NamedTuple):
    """How far each token [V] stays in a terminal: in bytes, and whether the terminal is complete after them."""

    stops: Tensor
    final: Tensor


class StoredMasks:
    """The masks of one grammar and one tokenizer, shared by the runs that use both."""

    def __init__(self, spelled: list[bytes]):
        self.lengths = torch.tensor([len(text) for text in spelled])
        # [V, longest]
        self.bytes = pad_sequence(
            [torch.tensor(list(text) or [0], dtype=torch.uint8) for text in spelled], batch_first=True
        )
        self.entries: dict[tuple[str, int, str], Lookup] = {}
        self.walks: dict[tuple[str, int], Walk] = {}

    @property
    def size(self) -> int:
        """Bytes in memory: two masks of one byte a token for each entry, three bytes a token for each walk."""
        return self.bytes.numel() + (8 + 2 * len(self.entries) + 3 * len(self.walks)) * len(self.lengths)


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
        self.automata, self.masks = automata, masks
        self.lengths = masks.lengths
        self.walked = 0  # bytes of tokens that were walked over in this step

    def begin_step(self) -> None:
        self.walked = 0

    def allowed(self, states: Mapping[str, int], following: Mapping[str, set[str]]) -> Lookup:
        """Tokens that may come where these terminals are in these states, and `following` may come after each.

        The lexer is greedy: a token crosses from a terminal to the next only where no other terminal goes on.
        """
        nothing = torch.zeros_like(self.lengths, dtype=torch.bool)
        if not states:
            return Lookup(nothing, nothing)
        stops = {t: self.walk(t, state).stops for t, state in states.items()}
        longest = torch.stack(list(stops.values())).amax(0)
        sure, undecided = (longest == self.lengths) & (self.lengths > 0), nothing
        for t, state in states.items():
            crosses = stops[t] == longest
            for second in sorted(following[t]):
                across = self.then(t, state, second)
                sure, undecided = sure | across.sure & crosses, undecided | across.undecided & crosses
        return Lookup(sure, undecided & ~sure)

    def inside(self, terminal: str, state: int) -> Tensor:
        """Tokens that stay within a terminal from a state on, [V]."""
        return (self.walk(terminal, state).stops == self.lengths) & (self.lengths > 0)

    def walk(self, terminal: str, state: int) -> Walk:
        """How far each token stays in a terminal from a state on."""
        key = terminal, state
        if key not in self.masks.walks:
            self._check()
            stops, states = self._walked(terminal, state, torch.zeros_like(self.lengths))
            self.masks.walks[key] = Walk(stops.short(), self._final(terminal, states))
        return self.masks.walks[key]

    def then(self, terminal: str, state: int, following: str) -> Lookup:
        """Tokens that complete a terminal, perhaps after some more bytes of it, and continue with the next one."""
        key = terminal, state, following
        if key not in self.masks.entries:
            self._check()
            self.masks.entries[key] = self._made(*key)
        return self.masks.entries[key]

    def _check(self) -> None:
        full = self.masks.size >= limits.STORE_BYTES
        if self.walked > limits.STEP_BYTES or full:
            what = "memory" if full else "time for one step"
            raise Refusal(
                f"The lookups of this grammar take too much {what}: give it fewer terminals, or use lark in place of"
                " syncode.",
                "constraint",
            )

    def _made(self, terminal: str, state: int, following: str) -> Lookup:
        stops, final = self.walk(terminal, state)
        left = (stops < self.lengths) & final
        ends, beyond = self._walked(following, 0, torch.where(left, stops, self.lengths))
        return Lookup(
            left & (ends == self.lengths),
            left & (ends > stops) & (ends < self.lengths) & self._final(following, beyond),
        )

    def _walked(self, terminal: str, state: int, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Where each token, read from an offset on, leaves the automaton or ends, and the state there, [V] each.
        """
        table, _ = self.automata[terminal].tensors
        at, states, going = starts.clone(), torch.full_like(starts, state), (starts < self.lengths).nonzero()[:, 0]
        while len(going):
            self.walked += len(going)
            following = table[states[going], self.masks.bytes[going, at[going]].long()]
            going, following = going[following != DEAD], following[following != DEAD]
            states[going] = following
            at[going] += 1
            going = going[at[going] < self.lengths[going]]
        return at, states

    def _final(self, terminal: str, states: Tensor) -> Tensor:
        return self.automata[terminal].tensors[1][states]
