"""Drafters: which tokens are proposed for verification?"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from playground.contract.base import Strategy
from playground.events import Drawn, Event

if TYPE_CHECKING:
    from playground.contract.interfaces import RowsInterface
    from playground.contract.lane import Lane
    from playground.contract.token_tree import TokenTree


class Drafter(Strategy):
    """Proposes draft tokens, as a tree."""

    kind = "drafter"
    drafts_at_will = True
    drawn: ClassVar[Drawn] = "deterministic"  # how sibling draft tokens are drawn

    def propose(self, lm: Lane, budget: int) -> Iterator:
        """Return a TokenTree at most `budget` deep, after yielding whatever requests that takes."""
        raise NotImplementedError

    def observe(self, tree: TokenTree, rows: RowsInterface, verdict: Event) -> None:
        """Learn from the target's rows and the verdict. Called after the accepted tokens are committed."""
