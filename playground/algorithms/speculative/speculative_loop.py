"""The round of speculative decoding, shared by every decoder that has a drafter and a verifier."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from playground.contract.token_tree import TokenTree

if TYPE_CHECKING:
    from playground.contract import Drafter, Lane, Verifier


def rounds(lm: Lane, drafter: Drafter, verifier: Verifier) -> Iterator:
    """Propose a draft tree, run the target on it in one forward, verify it, and commit the result; repeat."""
    yield lm.prefill()
    while True:
        tree, learns = yield from proposal(lm, drafter)
        if len(tree):
            yield tree.draft()  # shown before its verdict
        rows = yield lm.extend(tree)
        verdict = verifier.judge(lm, tree, rows)
        if len(tree):
            yield verdict
        try:
            yield lm.keep(verdict)
        finally:  # the generator is closed here when the text is complete; the drafter observes the last round too
            if learns:
                drafter.observe(tree, rows, verdict)


def proposal(lm: Lane, drafter: Drafter) -> Iterator:
    """Propose a draft tree, and say whether the drafter learns from its verdict.

    Once the draft model can read no more, the drafter is not asked: the tree is empty, for a plain decode step.
    """
    budget = lm.draft_budget(drafter)
    return (TokenTree(drafter.name), False) if budget is None else ((yield from drafter.propose(lm, budget)), True)
