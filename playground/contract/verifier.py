"""Verifiers: which draft tokens are accepted?"""
from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from playground.contract.base import Strategy
from playground.events import Drawn, Event

if TYPE_CHECKING:
    from playground.contract.interfaces import RowsInterface
    from playground.contract.lane import Lane
    from playground.contract.token_tree import TokenTree


class Verifier(Strategy):
    """Accepts or rejects draft tokens, given the target's rows."""

    kind = "verifier"
    exact_for: ClassVar[tuple[Drawn, ...]] = ()  # ways of drawing for which the output follows the target exactly
    greedy_only: ClassVar[bool] = False  # exact only if no sampler draws

    def judge(self, lm: Lane, tree: TokenTree, rows: RowsInterface) -> Event:
        """The Verdict on a draft tree; `rows` holds a row of the target for the root and for every node."""
        raise NotImplementedError
