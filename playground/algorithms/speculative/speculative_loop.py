"""Rounds of guessing and checking: what every decoder does that has a drafter and a verifier."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playground.contract import Drafter, Verifier
    from playground.decoding.lane import Lane


def rounds(lm: Lane, drafter: Drafter, verifier: Verifier) -> Iterator:
    """The drafter proposes a tree, one forward of the target gives a row for every node, the verifier says what stands.
    """
    yield lm.prefill()
    while True:
        tree = yield from drafter.propose(lm, lm.remaining - 1)
        if len(tree):
            yield tree.draft()  # the guess is seen before the verdict
        rows = yield lm.extend(tree)
        verdict = verifier.judge(lm, tree, rows)
        if len(tree):
            yield verdict
        try:
            yield lm.keep(verdict)
        finally:  # where this completes the text nobody comes back here, and the last round teaches too
            drafter.observe(tree, rows, verdict)
