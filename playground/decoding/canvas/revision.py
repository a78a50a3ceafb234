"""A step in which a canvas may take back what it holds."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Revision:
    """Tokens by position, which fill masks or replace other tokens, the probability of each to display, and positions
    that become masks again.
    """

    tokens: Mapping[int, int]
    confidence: Mapping[int, float]
    remasked: Collection[int] = ()

    def check(self, ids: Sequence[int | None]) -> None:
        """Raise ValueError if a canvas with these tokens, None where it is masked, cannot change this way."""
        touched = [*self.tokens, *self.remasked]
        if not touched or len(set(touched)) < len(touched) or not set(touched) <= set(range(len(ids))):
            raise ValueError(f"positions {touched} cannot be revised: each is one of {len(ids)} and listed once")
        if masked := [position for position in self.remasked if ids[position] is None]:
            raise ValueError(f"positions {masked} are masked, so they cannot be masked again")
