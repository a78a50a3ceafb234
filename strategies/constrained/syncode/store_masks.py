"""The masks of a lane from a mask store, with what the exact engine confirms."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from playground.grammar.lark.lalr import END
from strategies.constrained.syncode.mask_store import CHECKED, COMPARES, Lookup, MaskStore
from strategies.constrained.syncode.terminals import Configuration, LexState, Terminals

if TYPE_CHECKING:
    from playground.grammar.matcher import LookedUpMatcher

KEPT = 64  # masks of configurations


class LexedText(NamedTuple):
    """The end of a text, and the lexer's state there; None if the lexer cannot follow the text."""

    text: bytes
    at: LexState | None


@dataclass(frozen=True)
class Tally:
    """Who decided about the tokens of a mask. The last four are of a comparison, times in seconds."""

    sure: int = 0
    undecided: int = 0
    passed: int = 0  # of the undecided, by the engine
    forced: bool = False  # the mask holds the one token that the grammar forces, without a lookup
    overruled: int = 0  # of the sure, by the engine
    missed: int = 0  # legal by the engine, and not by the store
    seconds: float = 0.0
    engine_seconds: float = 0.0


class ConfirmedMask(NamedTuple):
    """A mask [V], and who decided about it."""

    mask: Tensor
    tally: Tally


@dataclass
class Savings:
    """What the masks of a lane took. The engine without a store computes every one of them."""

    masks: int = 0
    lookups: int = 0  # the other masks were known from an earlier text with the same parser stack and automaton states
    engine_masks: int = 0
    engine_tokens: int = 0  # that the engine was asked about one by one


@dataclass
class StoreMasks:
    """What the masks of a lane come from, and what is known of them."""

    terminals: Terminals
    store: MaskStore
    spelling: Callable[[int], bytes]
    undecided: str
    engine: str
    seen: dict[bytes, tuple[LexState | None, Tally]] = field(default_factory=dict)  # by text, of its mask
    savings: Savings = field(default_factory=Savings)
    counts: dict[tuple[str, int, str], list[int]] = field(default_factory=dict)  # of entries that were shown
    _known: dict[Configuration, ConfirmedMask] = field(default_factory=dict)

    # --- a source of masks ---

    def start(self) -> LexedText:
        return LexedText(b"", self.terminals.start())

    def after(self, place: LexedText, token: int) -> LexedText:
        spelled = self.spelling(token)
        return LexedText(place.text + spelled, self.terminals.after(place.at, spelled))

    def allowed(self, place: LexedText, engine: LookedUpMatcher) -> Tensor:
        return self.answer(place, engine).mask

    def given(self, place: LexedText, engine: LookedUpMatcher) -> Tensor:
        mask, tally = self.answer(place, engine)
        self.savings.masks += 1
        self.seen[place.text] = place.at, tally
        return mask

    # --- lookups ---

    def answer(self, place: LexedText, engine: LookedUpMatcher) -> ConfirmedMask:
        if place.at is None:
            return self._without_store(engine)
        if self.engine == COMPARES:
            return self._compared(place.at, engine)
        key = place.at.configuration
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._confirmed(place.at, engine)
        return self._known[key]

    def lookup(self, at: LexState) -> Lookup:
        """The tokens that the store is sure of in a state, and those that it leaves undecided."""
        self.savings.lookups += 1
        self.store.begin_step()
        return self.store.allowed(at.states, {t: self.terminals.following(at, t) - {END} for t in at.states})

    def _confirmed(self, at: LexState, engine: LookedUpMatcher) -> ConfirmedMask:
        """The mask of the store, with what the engine says of its undecided tokens and of the end."""
        checks = self.undecided == CHECKED
        if checks and (forced := engine.only_token()) is not None:
            return ConfirmedMask(_only(forced, engine.vocabulary), Tally(sure=1, forced=True))
        found = self.lookup(at)
        passed = self._passed(found.undecided, engine) if checks else []
        mask = found.sure.clone()
        mask[passed] = True
        mask[engine.end_index] = engine.accepting
        return ConfirmedMask(mask, Tally(int(found.sure.sum()), int(found.undecided.sum()), len(passed)))

    def _passed(self, undecided: Tensor, engine: LookedUpMatcher) -> list[int]:
        """The undecided tokens that the engine allows."""
        asked = undecided.nonzero()[:, 0].tolist()
        self.savings.engine_tokens += len(asked)
        return [token for token in asked if engine.confirms(token)]

    def _compared(self, at: LexState, engine: LookedUpMatcher) -> ConfirmedMask:
        """The same mask, and where the engine's differs from it."""
        start = perf_counter()
        mask, tally = self._confirmed(at, engine)
        found = perf_counter()
        legal = self._computed(engine)
        return ConfirmedMask(mask, replace(
            tally,
            overruled=int((mask & ~legal).sum()),
            missed=int((legal & ~mask).sum()),
            seconds=found - start,
            engine_seconds=perf_counter() - found,
        ))

    def _without_store(self, engine: LookedUpMatcher) -> ConfirmedMask:
        """Where the lexer cannot follow all tokens are undecided."""
        if self.undecided == CHECKED:
            return ConfirmedMask(self._computed(engine), Tally())
        return ConfirmedMask(torch.zeros(engine.vocabulary, dtype=torch.bool), Tally())

    def _computed(self, engine: LookedUpMatcher) -> Tensor:
        self.savings.engine_masks += 1
        return engine.exact_mask()


def _only(token: int, vocabulary: int) -> Tensor:
    """Where the grammar allows one continuation, its own token for it, as in the engine's masks."""
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[token] = True
    return mask
