"""The mask store of SynCode: which tokens may follow inside a terminal, and across its end into the next one.

A lookup names a terminal, the state of its automaton and the terminal after it, and answers for the whole vocabulary at
once. A token is looked at as far as those two terminals reach; what sticks out beyond them is left undecided.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from strategies.constrained.syncode.byte_dfa import DFA, EMPTY


class Lookup(NamedTuple):
    """Tokens [V]: surely legal, and those that reach beyond what was looked at."""

    sure: Tensor
    undecided: Tensor


class MaskStore:
    """Entries are made when they are first looked up, and stay."""

    def __init__(self, spelled: list[bytes], automata: dict[str, DFA]):
        self.automata = automata
        self.lengths = torch.tensor([len(text) for text in spelled])
        # [V, longest]
        self.bytes = pad_sequence([torch.tensor(list(text) or [0]) for text in spelled], batch_first=True)
        self.entries: dict[tuple[str, int, str | None], Lookup] = {}

    def inside(self, terminal: str, state: int) -> Tensor:
        """Tokens that stay within a terminal from a state on, [V]."""
        return self._entry(terminal, state, None).sure

    def then(self, terminal: str, state: int, following: str) -> Lookup:
        """Tokens that end a terminal, perhaps after some bytes more of it, and go on with the one that follows."""
        return self._entry(terminal, state, following)

    def _entry(self, terminal: str, state: int, following: str | None) -> Lookup:
        key = (terminal, state, following)
        if key not in self.entries:
            self.entries[key] = self._made(*key)
        return self.entries[key]

    def _made(self, terminal: str, state: int, following: str | None) -> Lookup:
        stops, states = self._walk(terminal, state, torch.zeros_like(self.lengths))
        whole = (stops == self.lengths) & (self.lengths > 0)
        if following is None:
            return Lookup(whole, torch.zeros_like(whole))
        left = ~whole & (self.lengths > 0) & self._final(terminal, states)
        ends, beyond = self._walk(following, 0, stops)
        return Lookup(
            left & (ends == self.lengths),
            left & (ends > stops) & (ends < self.lengths) & self._final(following, beyond),
        )

    def _walk(self, terminal: str, state: int, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Where each token, read from a place on, leaves the automaton or ends, and the state it is in there, [V] each.
        """
        table, _ = self.automata[terminal].tensors
        at, states, going = starts.clone(), torch.full_like(starts, state), starts < self.lengths
        while bool(going.any()):
            byte = self.bytes.gather(1, at.clamp(max=self.bytes.shape[1] - 1)[:, None])[:, 0]
            following = table[states, byte]
            going = going & (following != EMPTY)
            states, at = torch.where(going, following, states), at + going
            going = going & (at < self.lengths)
        return at, states

    def _final(self, terminal: str, states: Tensor) -> Tensor:
        return self.automata[terminal].tensors[1][states]
