"""Greedy match against the law of its texts by hand, and wrong variants against the same check."""
from __future__ import annotations

from random import Random

import pytest
from tables import TableModel, write

from playground.algorithms.speculative.verification import match, walk
from playground.contract import Drafter, Verifier, find
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.sampling import one_hot
from support.speculation_oracles import NAMES, PROMPT, Recording, argmax, assert_refused, speculation


class Scattered(Drafter):
    """Trees of random shape and tokens; siblings differ."""

    drawn = "deterministic"

    def __init__(self, seed: int, size: int = 9):
        self.chance, self.size = Random(seed), size

    def propose(self, lm, budget):
        yield from ()
        tree, places = TokenTree("scattered"), set()
        for _ in range(self.size):
            place = (self.chance.randrange(-1, len(tree)), self.chance.randrange(lm.vocabulary))
            if place not in places and len(tree.path(place[0])) < budget:
                places.add(place)
                tree.add(place[1], place[0])
        return tree


def longest_path_of_argmaxes(model: TableModel, text: list[int], tree: TokenTree) -> list[int]:
    """Tokens of the deepest node that greedy decoding would pass through, and the token after it."""
    paths = [[], *(tree.prefix(node) for node in range(len(tree)))]
    right = [path for path in paths if all(argmax(model, text + path[:i]) == token for i, token in enumerate(path))]
    longest = max(right, key=len)
    return [*longest, argmax(model, text + longest)]


def check_greedy_match(verifier: type[Verifier]) -> None:
    accepted = 0
    for seed in range(4):
        model, seen = TableModel("abc", seed=seed), Recording(verifier())
        write(speculation(Scattered(seed), seen), {"target": model}, PROMPT, Limits(0, 30), Draws(0))
        for text, tree, verdict in seen.rounds:
            tokens = [*(tree.tokens[node] for node in verdict.kept), verdict.token]
            assert tokens == longest_path_of_argmaxes(model, text, tree)
            accepted += len(verdict.kept)
    assert accepted > 20, "too few draft tokens were accepted to prove anything"


class LooksAtTheFirstSibling(find("greedy_match")):
    def judge(self, lm, tree, rows):
        def rule(node, children):
            return match(rows.best(node), children[:1], tree, one_hot(rows.best(node), rows.raw[0]))

        return walk(lm, tree, rows, rule)


class AcceptsTheRunnerUp(find("greedy_match")):
    """A draft token is accepted if it is among the two most probable tokens."""

    def judge(self, lm, tree, rows):
        def rule(node, children):
            two = rows.raw[rows.row(node)].topk(2).indices.tolist()
            found = next((token for token in two if token in [tree.tokens[child] for child in children]), two[0])
            return match(found, children, tree, one_hot(found, rows.raw[0]))

        return walk(lm, tree, rows, rule)


@pytest.mark.oracle("greedy_match")
def test_greedy_match_accepts_the_longest_path_of_argmaxes():
    check_greedy_match(find("greedy_match"))


@pytest.mark.refuses("greedy_match")
@pytest.mark.parametrize("wrong", [LooksAtTheFirstSibling, AcceptsTheRunnerUp], ids=NAMES)
def test_a_wrong_greedy_match_is_detected(wrong):
    assert_refused(check_greedy_match, wrong)
