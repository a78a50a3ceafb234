"""BiLD: a small model generates, and falls back to a large one when it is uncertain."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import exp

from playground.algorithms.speculative.drafting import draft_distribution, grow, independent, new_tree
from playground.algorithms.speculative.verification import Ruling, walk
from playground.contract import Decoder, Lane, knob
from playground.events import Event, Figure, Switch, Test


class BiLD(Decoder):
    """A small model generates while it is confident. Otherwise the large model checks its tokens, rolls back those it
    disagrees with, and generates one token.

    Fallback: the small model hands over before a token whose top probability is below `fallback`, and after at most
    `most` tokens. Rollback: the first of its tokens with -log p above `rollback` nats under the large model, unless it
    is the large model's top token, is replaced by the large model's token and all later ones are discarded. The large
    model runs rarely and generates the hard tokens. Unlike in speculative decoding, the text may differ from the large
    model's. rollback = 0 yields the large model's greedy text, rollback = 20 almost never rolls back, most = 0 disables
    the small model. As in the authors' code the large model generates the first token, the default maximum is ten
    tokens, and probabilities are those after all samplers. There, an end token from the small model ends the text
    unchecked; here the large model checks it like any other token. Kim et al. 2023, arXiv 2302.07863.
    """

    name, title, paper, sheet = "bild", "Big Little Decoder (BiLD)", "2302.07863", "speculative/bild"
    needs, guarantee, drawn = ("draft",), ("heuristic", "collapses"), "independent"

    fallback: float = knob(
        0.6, 0.0, 1.0, step=0.05, help="top probability of the small model below which the large model takes over"
    )
    rollback: float = knob(
        5.0,
        0.0,
        20.0,
        step=0.5,
        help="surprisal in nats above which the large model rolls a token back; 20: almost never",
    )
    most: int = knob(10, 0, 32, step=1, help="maximum consecutive tokens of the small model; 0 disables it")

    def decode(self, lm: Lane) -> Iterator:
        rows = yield lm.prefill()
        yield lm.keep(lm.pick(rows))
        while True:
            tree = yield from self._draft(lm)
            if len(tree):
                yield tree.draft()
            rows = yield lm.extend(tree)
            verdict = walk(lm, tree, rows, partial(self._verify, lm, tree, rows))
            if len(tree):
                yield from self._report(lm, tree, verdict)
            yield lm.keep(verdict)

    def _draft(self, lm: Lane) -> Iterator:
        """Tokens of the small model until it is uncertain, as a chain."""
        tree = new_tree(lm, self)

        def level(rows, leaves, number):
            q = draft_distribution(lm, tree, rows, leaves[0])
            return [] if q is None or float(q.max()) < self.fallback else independent(lm, tree, rows, leaves[0], 1)

        return (yield from grow(lm, lm.stream("draft"), tree, min(self.most, lm.remaining - 1), level))

    def _verify(self, lm: Lane, tree, rows, node: int, children: list[int]) -> Ruling:
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

    def _report(self, lm: Lane, tree, verdict) -> Iterator[Event]:
        """The verdict, the switches between models, and the large model's probabilities."""
        yield verdict
        accepted, rolled_back = len(verdict.kept), len(tree) - len(verdict.kept)
        if accepted:
            yield Switch(lm.generated, "small", f"accepted tokens: {accepted}")
        if verdict.token >= 0:
            why = (
                f"tokens rolled back: {rolled_back}"
                if rolled_back
                else "the small model was uncertain, or reached its maximum"
            )
            yield Switch(lm.generated + accepted, "large", why)
        labels, values = (
            [lm.piece(token) for token in tree.tokens[: len(verdict.tests)]],
            [test.p for test in verdict.tests],
        )
        yield Figure(
            "bars", "probability of the small model's tokens under the large one", {"labels": labels, "values": values}
        )
