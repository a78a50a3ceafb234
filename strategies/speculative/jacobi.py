"""Jacobi decoding: the model corrects its own guesses until they stand."""
from collections.abc import Iterator
from random import Random

import torch

from playground.algorithms.speculative.drafting import new_tree, purpose
from playground.algorithms.speculative.verification import certain
from playground.contract import Drafter, knob
from playground.events import Figure


class Jacobi(Drafter):
    """Guess a whole window of tokens, read it in one pass, and guess each place anew by what the model now says there.

    Guesses that stand leave the window at its front; all later ones are guessed again from their own rows, though what
    stands before them may still be wrong, and new places are filled without asking anyone. Without chance this is the
    fixed-point iteration of Santilli et al. 2023, arXiv 2305.10427: a guess is the best token of its row. With chance
    it is drawn from its row and keeps that row as its q, so that rejection is exact: speculative Jacobi decoding. Text
    gains little from it without a model trained for that. Of a row that a grammar leaves nothing of, after an illegal
    guess, the model's own favourite is taken. window = 0 is plain decoding. Teng et al. 2024, arXiv 2410.01699.
    """

    name, title, paper, sheet = "jacobi", "Jacobi decoding", "2410.01699", "speculative/jacobi"
    drawn, guarantee = "independent", ("collapses",)

    window: int = knob(15, 0, 31, step=1, help="tokens guessed at once; 0 is plain decoding")
    init: str = knob(
        "random",
        choices=("random", "uniform", "repeat"),
        help="what fills new places: any token, taken for certain; "
        "one drawn evenly and judged so; or the last token again",
    )

    _rows = None  # what the model said of the last window

    def propose(self, lm, budget) -> Iterator:
        tree, depth = new_tree(lm, self), min(self.window, budget)
        again = self._left_over()[:depth]
        if again:
            # samplers look at them together, which is cheaper
            self._rows.stages_of([self._rows.row(node) for node in again])
        for place in range(depth):
            token, q = self._redrawn(lm, again[place], place) if place < len(again) else self._initial(lm, tree, place)
            tree.add(token, place - 1, q if lm.chain.draws else None)
        if depth:
            series = {"guessed anew by the model": len(again), "new places": depth - len(again)}
            yield Figure("scalar", "guesses of a window", {"x": lm.generated, "series": series})
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._rows = rows

    def _left_over(self) -> list[int]:
        """Nodes of the last window whose rows are about places that are still to come."""
        if self._rows is None:
            return []
        committed = len(self._rows.sequence.tokens) - self._rows.length  # those a grammar forced included
        return list(range(committed - 1, len(self._rows.tree)))

    def _redrawn(self, lm, node, place) -> tuple[int, torch.Tensor]:
        """A guess from the row after a node of the last window, and the distribution [V] it was drawn from."""
        rows, row = self._rows, self._rows.row(node)
        if rows.masks is not None and not bool(rows.masks[row].any()):
            token = int(rows.raw[row].argmax())
        elif lm.chain.draws:
            q = rows.chances(node)
            return lm.draw(q, len(lm.tokens) + place, purpose(place - 1, 0)), q
        else:
            token = rows.best(node)
        return token, certain(token, rows.raw[row])

    def _initial(self, lm, tree, place) -> tuple[int, torch.Tensor]:
        """A guess that asks nobody, and its distribution [V]."""
        like, position = lm.target.seen.raw[0], len(lm.tokens) + place
        if self.init == "uniform":
            even = torch.full_like(like, 1 / len(like))
            return lm.draw(even, position, purpose(place - 1, 0)), even
        before = tree.tokens[-1] if len(tree) else lm.tokens[-1]
        token = before if self.init == "repeat" else Random(position).randrange(len(like))
        return token, certain(token, like)
