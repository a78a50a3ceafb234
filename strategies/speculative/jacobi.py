"""Jacobi decoding: the model refines a window of its own draft tokens in parallel until they are accepted."""
from collections.abc import Iterator
from random import Random

import torch

from playground.algorithms.speculative.drafting import new_tree, purpose
from playground.contract import Drafter, Lane, knob
from playground.engine.sampling import first_largest, one_hot
from playground.events import Figure


class Jacobi(Drafter):
    """Draft a whole window of tokens, run the model on it in one forward, and update every position from its row.

    Accepted tokens leave the window at the front. All later positions are updated from their own rows, although the
    tokens before them may still be wrong, and new positions are initialised without a forward. Under greedy decoding
    this is the fixed-point iteration of Santilli et al. 2023, arXiv 2305.10427: a draft token is the argmax of its row.
    Otherwise it is sampled from its row, which becomes its q, so that rejection is exact: speculative Jacobi decoding.
    The speed-up is small without a model trained for it. If a constraint masks a whole row, because it forbids an
    earlier draft token, the unmasked argmax is taken. window = 0 is plain decoding. Teng et al. 2024, arXiv 2410.01699.
    """

    name, title, paper, sheet = "jacobi", "Jacobi decoding", "2410.01699", "speculative/jacobi"
    drawn, guarantee = "independent", ("collapses",)

    window: int = knob(15, 0, 31, step=1, help="draft tokens in the window; 0 is plain decoding")
    init: str = knob(
        "random",
        choices=("random", "uniform", "repeat"),
        help="initial tokens of new positions: random, as deterministic drafts; "
        "sampled uniformly, with that as q; or the last token repeated",
    )

    _rows = None  # the target's rows for the last window

    def propose(self, lm: Lane, budget) -> Iterator:
        tree, depth = new_tree(lm, self), min(self.window, budget)
        nodes = self._remaining()[:depth]
        if nodes:
            # process these rows in one batch, which is cheaper
            self._rows.stages_of([self._rows.row(node) for node in nodes])
        for i in range(depth):
            token, q = self._resampled(lm, nodes[i], i) if i < len(nodes) else self._initial(lm, tree, i)
            tree.add(token, i - 1, q if lm.chain.draws else None)
        if depth:
            series = {"updated by the model": len(nodes), "new positions": depth - len(nodes)}
            yield Figure("scalar", "draft tokens of the window", {"x": lm.generated, "series": series})
        return tree

    def observe(self, tree, rows, verdict) -> None:
        self._rows = rows

    def _remaining(self) -> list[int]:
        """Nodes of the last window whose rows predict positions that are not committed yet."""
        if self._rows is None:
            return []
        committed = len(self._rows.sequence.tokens) - self._rows.length  # includes forced tokens
        return list(range(committed - 1, len(self._rows.tree)))

    def _resampled(self, lm: Lane, node, place) -> tuple[int, torch.Tensor]:
        """A draft token from the row after a node of the last window, and the distribution [V] it was drawn from."""
        rows, row = self._rows, self._rows.row(node)
        if rows.dead_end(node):
            token = int(first_largest(rows.raw[row]))
        elif lm.chain.draws:
            q = rows.distribution(node)
            return lm.draw(q, len(lm.tokens) + place, purpose(place - 1, 0)), q
        else:
            token = rows.best(node)
        return token, one_hot(token, rows.raw[row])

    def _initial(self, lm: Lane, tree, place) -> tuple[int, torch.Tensor]:
        """An initial draft token for a new position, and its distribution [V]."""
        like, position = lm.target.seen.raw[0], len(lm.tokens) + place
        if self.init == "uniform":
            uniform = torch.full_like(like, 1 / len(like))
            return lm.draw(uniform, position, purpose(place - 1, 0)), uniform
        before = tree.tokens[-1] if len(tree) else lm.tokens[-1]
        token = before if self.init == "repeat" else Random(position).randrange(len(like))
        return token, one_hot(token, like)
