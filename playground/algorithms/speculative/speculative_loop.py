"""The round of speculative decoding, shared by every decoder that has a drafter and a verifier."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playground.contract import Drafter, Verifier
    from playground.decoding.lane import Lane


def rounds(lm: Lane, drafter: Drafter, verifier: Verifier) -> Iterator:
    """Propose a draft tree, run the target on it in one forward, verify it, and commit the result; repeat."""
    yield lm.prefill()
    while True:
        tree = yield from drafter.propose(lm, lm.remaining - 1)
        if len(tree):
            yield tree.draft()  # shown before its verdict
        rows = yield lm.extend(tree)
        verdict = verifier.judge(lm, tree, rows)
        if len(tree):
            yield verdict
        try:
            yield lm.keep(verdict)
        finally:  # the generator is closed here when the text is complete; the drafter observes the last round too
            drafter.observe(tree, rows, verdict)
