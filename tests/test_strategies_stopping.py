"""Draft length: chains that stop when a rejection becomes likely, and lengths by goodput."""
from __future__ import annotations

from tables import write

from playground.algorithms.speculative.drafting import chain_until, new_tree
from playground.contract import find
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from support.laws import tables
from support.speculative_runs import with_drafter


def test_a_stop_rule_is_evaluated_after_each_draft_token_and_ends_the_chain():
    asked = []

    class Stopping(find("draft_model")):
        def propose(self, lm, budget):
            return (
                yield from chain_until(
                    lm,
                    lm.stream("draft"),
                    new_tree(lm, self),
                    budget,
                    lambda chain: asked.append(len(chain)) or len(chain) == 3,
                )
            )

    write(with_drafter(Stopping()), tables("abc"), [0], Limits(0, 20), Draws(0))
    assert asked[:3] == [1, 2, 3] and max(asked) == 3
