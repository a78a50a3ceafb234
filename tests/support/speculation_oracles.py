"""Models and runs for the oracles of verifiers and drafters."""
from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter

import pytest
from tables import TableModel, distance, law, product_law

from playground.contract import Drafter, Verifier, make
from playground.contract.assembly import Assembly

AT_ONE = ("temperature", {"t": 1.0})
EXACT = 1e-9
NAMES = attrgetter("__name__")


def tables(letters: str = "abc") -> dict[str, TableModel]:
    return {"target": TableModel(letters), "draft": TableModel(letters, seed=1)}


def speculation(drafter: Drafter, verifier: Verifier, *samplers: tuple[str, dict]) -> Assembly:
    decoder = make("speculative")
    decoder.drafter, decoder.verifier = drafter, verifier
    return Assembly(decoder, [make(name, **knobs) for name, knobs in samplers])


def assert_refused(check: Callable, *case) -> None:
    """The check fails for what it compares, not because the wrong variant broke its lane."""
    with pytest.raises(AssertionError) as found:
        check(*case)
    assert not re.search(r"Failed\(|another fork", str(found.value))


class Recording(Verifier):
    """Records the text, the tree and the verdict of every round, and delegates to another verifier."""

    def __init__(self, verifier: Verifier):
        self.verifier, self.rounds = verifier, []

    def judge(self, lm, tree, rows):
        verdict = self.verifier.judge(lm, tree, rows)
        self.rounds.append((list(rows.committed), tree, verdict))
        return verdict

    def __deepcopy__(self, memo):
        return self


def argmax(model: TableModel, text: list[int]) -> int:
    scores = model.scores(tuple(text)).tolist()
    return scores.index(max(scores))


PROMPT = [0, 1, 0]
CHAIN, SIBLINGS = make("draft_model", depth=2), make("draft_model", depth=1, width=2)


def check_law(verifier: Verifier, drafter: Drafter) -> None:
    models = tables()
    found = law(speculation(drafter, verifier, AT_ONE), models, PROMPT, 2)
    assert distance(found, product_law(models["target"], PROMPT, 2)) < EXACT
