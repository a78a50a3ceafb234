"""The random numbers of a lane."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from playground.contract.lane import LaneRandomness
from playground.contract.token_tree import ROOT
from playground.decoding.lane.handed_back import handed_back
from playground.decoding.rng import Draws, Remaining, within
from playground.decoding.rows import Rows, TokenChoice
from playground.decoding.sequence import Sequence
from playground.engine.sampling import first_largest

if TYPE_CHECKING:
    from playground.contract.interfaces import Drawn, RowsInterface, SequenceInterface


class RandomNumbers(LaneRandomness):
    """Choices of tokens and other chance events, all from one seed."""

    def __init__(self, seed: int):
        self.draws = Draws(seed)

    def pick(self, rows: RowsInterface, node: int = ROOT, purpose: str = "token") -> TokenChoice:
        rows = rows if isinstance(rows, Rows) else handed_back(rows, Rows)  # no call for each token
        if not rows.raw.is_cpu and not rows.read_together:
            return TokenChoice(self._pick_on_device(rows, node, purpose), rows, node)
        if not rows.chain.draws:
            return TokenChoice(rows.best(node), rows, node)
        token = self.draws.pick(rows.distribution(node), purpose, rows.position(node), rows.sequence.lineage)
        return TokenChoice(token, rows, node)

    def _pick_on_device(self, rows: Rows, node: int, purpose: str) -> int:
        """The same token, which the device knows before the host reads it."""
        if not rows.chain.draws:
            return take(rows, first_largest(rows.stages_of([rows.row(node)])[-1].scores)[0], node)
        key = purpose, rows.position(node), rows.sequence.lineage
        if purpose == "token" and node in rows.foreseen:
            self.draws.uniform(*key)
            return rows.foreseen[node]
        p = rows.distribution(node)
        return within(take(rows, self.draws.index(p, *key), node), p)

    def choose(
        self, rows: RowsInterface, token: int, node: int = ROOT, leaf: SequenceInterface | None = None
    ) -> TokenChoice:
        by = None if leaf is None else handed_back(leaf, Sequence)
        return TokenChoice(token, handed_back(rows, Rows), node, by=by)

    def draw(self, p: torch.Tensor, position: int, purpose: str) -> int:
        return self.draws.pick(p, purpose, position)

    def draw_each(self, p: torch.Tensor, keys: list[list[tuple[str, int]]]) -> Drawn:
        if p.is_cpu:
            return [[(self.draw(row, at, purpose), None) for purpose, at in own] for row, own in zip(p, keys)]
        return self.draws.pick_each(p, keys)

    def draw_unread(self, p: torch.Tensor, keys: list[list[tuple[str, int]]]) -> torch.Tensor:
        return self.draws.indices(p, keys)

    def undraw(self, keys: list[tuple[str, int]]) -> None:
        self.draws.undo(keys)

    def foresee(self, p: torch.Tensor, keys: list[list[tuple[str, int, int]]]) -> torch.Tensor:
        return self.draws.indices(p, keys, self.draws.peek)

    def draw_remaining(self, remaining: Remaining, position: int, purpose: str) -> int:
        return self.draws.take(remaining, purpose, position)

    def flip(self, probability: float, position: int, purpose: str = "accept") -> tuple[bool, float]:
        return self.draws.flip(probability, purpose, position)

    def uniform(self, position: int, purpose: str) -> float:
        return self.draws.uniform(purpose, position)


def take(rows: Rows, drawn: torch.Tensor, node: int) -> int:
    """The token after a node that was drawn on a device, [1], read with what is recorded of its row.

    The next forward begins first, where the text is expected to go on with it. V or more stays what it is.
    """
    if rows.go_on and rows.count == 1:
        rows.go_on(drawn.clamp(max=rows.raw.shape[1] - 1))
    if rows.count == 1:
        ((token,),), = rows.read_with([rows.row(node)], drawn[None])
        rows.taken = int(token)
    else:  # rows that are committed together are recorded together
        rows.taken = int(drawn)
    return rows.taken
