"""Drafters that learn while a text grows: their drafts of each round, compared with a draft computed anew."""
from __future__ import annotations

from typing import Protocol


class RecordsRounds:
    """A drafter that records the text before each round, what was drafted, and how many tokens were asked for.

    For a class of tests, before the drafter itself: `class Recording(RecordsRounds, find(NAME))`.
    """

    def __deepcopy__(self, memo):
        return self  # so that the test sees what it records

    def propose(self, lm, budget):
        text = list(lm.tokens)
        tree = yield from super().propose(lm, budget)
        self.rounds = [*getattr(self, "rounds", []), (text, list(tree.tokens), min(self.depth, budget))]
        return tree


class LearningByHand(Protocol):
    """A draft and its learning, computed without the drafter."""

    def chain(self, text: list[int], length: int) -> list[int]:
        """At most `length` draft tokens after a text."""

    def observe(self, text: list[int], path: list[int], after: list[int]) -> None:
        """Learn from draft tokens after a text, given the text after the round."""


def departs(drafter: RecordsRounds, written: list[int], draft: LearningByHand) -> bool:
    """Whether what was drafted in some round of a text differs from the draft computed anew."""
    assert len(drafter.rounds) > 6, "too few rounds to prove anything"
    for (text, tokens, length), (after, *_) in zip(drafter.rounds, [*drafter.rounds[1:], (written,)]):
        expected = draft.chain(text, length)
        if tokens != expected:
            return True
        draft.observe(text, expected, after)
    return False
