"""The law of the first trees that a drafter proposes."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import permutations

from tables import Enumerating, Law, watch

from playground.contract import Drafter, make
from playground.contract.token_tree import ROOT, TokenTree
from playground.decoding.limits import Limits
from support.speculation_oracles import AT_ONE, Recording, speculation


def first_trees(drafter: Drafter, models: dict, length: int,
                *samplers: tuple[str, dict]) -> Iterator[tuple[float, TokenTree]]:
    """Every tree that may be proposed first after a prompt of one token, with its probability."""
    draws = Enumerating()
    for _ in draws.runs():
        seen = Recording(make("sample_match"))
        for lane in watch(speculation(drafter, seen, *samplers), models, [0], Limits(0, length), draws):
            if lane.generated:
                break
        yield draws.weight, seen.rounds[0][1]


def law_of_first_trees(drafter: Drafter, models: dict, length: int, describe: Callable[[TokenTree], tuple]) -> Law:
    found: Law = defaultdict(float)
    for weight, tree in first_trees(drafter, models, length, AT_ONE):
        found[describe(tree)] += weight
    return dict(found)


# --- drafters that sample: the distribution of their first tree ---

def chain_of(tree: TokenTree) -> tuple[int, ...]:
    return tuple(tree.tokens)


def siblings_of(tree: TokenTree) -> tuple[int, ...]:
    return tuple(tree.tokens[node] for node in tree.children(ROOT))


def without_replacement(chances: Law, count: int) -> Law:
    """Distribution of `count` outcomes sampled one after another without replacement."""
    found = {}
    for order in permutations(chances, count):
        found[order], left = 1.0, 1.0
        for outcome in order:
            found[order] *= chances[outcome] / left
            left -= chances[outcome]
    return found
