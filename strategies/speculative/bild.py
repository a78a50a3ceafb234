"""BiLD: a little model writes and hands the hard words to a big one."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import exp

from playground.algorithms.speculative.drafting import grow, guess_row, independent, new_tree
from playground.algorithms.speculative.verification import Ruling, walk
from playground.contract import Decoder, knob
from playground.events import Event, Figure, Switch, Test


class BiLD(Decoder):
    """The small model writes while it is sure. Where it is not, the large one reads what was written, takes back what
    it finds wrong, and writes a token.

    Fallback: the small model hands over before a token whose best candidate has less than `fallback`, and after `most`
    tokens at the latest. Rollback: the first of its tokens that the large model gives a surprise -log p above
    `rollback` nats, and would not write itself, goes with all that follows, and the large model's own stands in its
    place. So its passes are few, and its own tokens are the hard ones; unlike in speculative decoding the text may
    differ from the large model's. rollback = 0 writes the large model's greedy text, rollback = 20 takes hardly
    anything back, most = 0 leaves the small model out. Kim et al. 2023, arXiv 2302.07863. As in the authors' code the
    large model begins, ten tokens are the most, and odds are those after all samplers; there an end token of the small
    model ends the text unread, here it is read like any other.
    """

    name, title, paper, sheet = "bild", "Big Little Decoder (BiLD)", "2302.07863", "speculative/bild"
    needs, guarantee, drawn = ("draft",), ("heuristic", "collapses"), "independent"

    fallback: float = knob(
        0.6, 0.0, 1.0, step=0.05, help="probability of the small model's best token below which the large one writes"
    )
    rollback: float = knob(
        5.0,
        0.0,
        20.0,
        step=0.5,
        help="surprise in nats above which the large model takes a token back; 20: hardly ever",
    )
    most: int = knob(10, 0, 32, step=1, help="tokens of the small model in a row, at most; 0 leaves it out")

    def decode(self, lm) -> Iterator:
        rows = yield lm.prefill()
        yield lm.keep(lm.pick(rows))
        while True:
            tree = yield from self._little(lm)
            if len(tree):
                yield tree.draft()
            rows = yield lm.extend(tree)
            verdict = walk(lm, tree, rows, partial(self._stands, lm, tree, rows))
            if len(tree):
                yield from self._told(lm, tree, verdict)
            yield lm.keep(verdict)

    def _little(self, lm) -> Iterator:
        """What the small model writes until it is unsure, as a chain."""
        tree = new_tree(lm, self)

        def level(rows, leaves, number):
            q = guess_row(lm, tree, rows, leaves[0])
            return [] if q is None or float(q.max()) < self.fallback else independent(lm, tree, rows, leaves[0], 1)

        return (yield from grow(lm, lm.stream("draft"), tree, min(self.most, lm.remaining - 1), level))

    def _stands(self, lm, tree, rows, node: int, children: list[int]) -> Ruling:
        child, p = children[0], rows.scores[rows.row(node)].softmax(-1)
        token = tree.tokens[child]
        test = Test(
            child,
            float(p[token]),
            tree.confidence[child],
            None,
            bool(p[token] >= exp(-self.rollback)) or token == rows.best(node),
        )
        return Ruling(child, tests=[test]) if test.kept else Ruling(None, lm.pick(rows, node).token, [test], p)

    def _told(self, lm, tree, verdict) -> Iterator[Event]:
        """The guesses' fate, and who wrote from where on."""
        yield verdict
        kept, taken = len(verdict.kept), len(tree) - len(verdict.kept)
        if kept:
            yield Switch(lm.generated, "small", f"tokens it was sure of: {kept}")
        if verdict.token >= 0:
            why = (
                f"takes back from the small model: {taken}"
                if taken
                else "the small model was unsure, or had written its share"
            )
            yield Switch(lm.generated + kept, "large", why)
        labels, values = (
            [lm.piece(token) for token in tree.tokens[: len(verdict.tests)]],
            [test.p for test in verdict.tests],
        )
        yield Figure(
            "bars", "probability the large model gives what the small one wrote", {"labels": labels, "values": values}
        )
