"""Draft trees whose nodes carry prompt tokens, sized for a number of inputs.

The *state* of a round is the number k of guesses that it begins with: the prompt tokens of the last accepted node. Each
state has a tree of its own, at most k deep. Chen et al. 2024, arXiv 2405.18628.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from heapq import heapify, heappop, heappush
from math import prod
from typing import NamedTuple

from playground.algorithms.draft_heads.accuracy_tree import Path, best_paths

Accuracy = tuple[tuple[float, ...], ...]
"""How often the token of each rank is right, by prompt token."""

SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96)  # numbers of inputs that are compared
ITERATIONS = 2  # of the values of the states, which depend on the trees, which depend on the values
ROOT_PATH: Path = ()


class PromptTree(NamedTuple):
    """The tree of one state."""

    paths: list[Path]  # of ranks, parents before their children
    prompts: dict[Path, int]  # prompt tokens of the root and of each node
    last: dict[Path, float]  # probability that this is the last accepted node

    @property
    def tokens(self) -> float:
        """Expected number of tokens of a round: the accepted ones and the one after them."""
        return 1 + sum(len(path) * share for path, share in self.last.items())

    def value(self, values: list[float]) -> float:
        """Expected tokens of this round and the next, given those of a round in each state."""
        return self.tokens + sum(share * values[self.prompts[path]] for path, share in self.last.items())


@cache
def prompt_trees(accuracy: Accuracy, inputs: int) -> list[PromptTree]:
    """The tree of every state 0, 1, ..., len(accuracy), each with at most `inputs` nodes and prompt tokens."""
    states = range(len(accuracy) + 1)
    values = [1 + sum(prod(ranks[0] for ranks in accuracy[:depth]) for depth in range(1, k + 1)) for k in states]
    trees: list[PromptTree] = []
    for _ in range(ITERATIONS):
        trees = [best_split(accuracy, k, inputs, values) for k in states]
        values = [tree.tokens for tree in trees]
    return trees


def best_split(accuracy: Accuracy, state: int, inputs: int, values: list[float]) -> PromptTree:
    """The tree of a state whose split into nodes and prompt tokens promises the most tokens in this round and the next.
    """
    largest = max(0, (inputs - 1) // 2)  # every node and the root carry at least one prompt token
    paths = best_paths([list(ranks) for ranks in accuracy[:state]], largest)
    trees = [sized(paths[:0] if not count else _largest(accuracy, paths, count), accuracy, inputs, values)
             for count in range(len(paths) + 1)]
    return max(trees, key=lambda tree: tree.value(values))


def _largest(accuracy: Accuracy, paths: list[Path], count: int) -> list[Path]:
    """The `count` paths with the largest products; a parent is never less probable than its children."""
    best = sorted(paths, key=lambda path: (-share_of(accuracy, path), len(path), path))[:count]
    return sorted(best, key=lambda path: (len(path), path))


def share_of(accuracy: Accuracy, path: Path) -> float:
    """The estimated probability that a path is accepted."""
    return prod(accuracy[depth][rank] for depth, rank in enumerate(path))


def sized(paths: list[Path], accuracy: Accuracy, inputs: int, values: list[float]) -> PromptTree:
    """A tree of these paths whose nodes lose their last prompt tokens until the inputs suffice.

    The next one to go is always that whose loss costs the fewest expected tokens; one stays at every node if it can.
    """
    last = last_accepted(paths, accuracy)
    prompts, excess = dict.fromkeys(last, len(accuracy)), len(paths) + len(last) * len(accuracy) - inputs

    def cost(path: Path) -> float:
        return last[path] * (values[prompts[path]] - values[prompts[path] - 1])

    waiting = [(cost(path), path) for path in last if len(accuracy) > 1]
    heapify(waiting)
    while excess > 0 and waiting:
        path = heappop(waiting)[1]
        prompts[path], excess = prompts[path] - 1, excess - 1
        if prompts[path] > 1:
            heappush(waiting, (cost(path), path))
    if excess > 0:
        return PromptTree([], {ROOT_PATH: min(len(accuracy), inputs)}, {ROOT_PATH: 1.0})
    return PromptTree(paths, prompts, last)


def last_accepted(paths: list[Path], accuracy: Accuracy) -> dict[Path, float]:
    """The probability that the root, or a node, is the last accepted one; they sum to 1."""
    shares = {ROOT_PATH: 1.0, **{path: share_of(accuracy, path) for path in paths}}
    found = dict(shares)
    for path in paths:
        found[path[:-1]] -= shares[path]
    return {path: max(0.0, share) for path, share in found.items()}


class RoundSize(NamedTuple):
    """What a round with so many draft tokens and prompt tokens promises."""

    inputs: int
    tokens: float  # expected
    seconds: float  # of its forward

    @property
    def speed(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def round_sizes(accuracy: Accuracy, most: int, seconds: Callable[[int], float]) -> list[RoundSize]:
    """What rounds of the sizes up to `most` promise, plain decoding first.

    `seconds` is the time of a forward by its rows, of which one is the token that is read.
    """
    sizes = [0, *(size for size in SIZES if size < most), *[most] * (most > 0)]
    tokens = [tokens_per_round(prompt_trees(accuracy, size)) if size else 1.0 for size in sizes]
    return [RoundSize(size, each, seconds(1 + size)) for size, each in zip(sizes, tokens)]


def tokens_per_round(trees: list[PromptTree]) -> float:
    """Expected tokens of a round in the long run, over the stationary distribution of the states."""
    states = [0.0] * len(trees)
    states[-1] = 1.0
    for _ in range(200):  # converges geometrically
        following = [0.0] * len(trees)
        for share, tree in zip(states, trees):
            for path, last in tree.last.items():
                following[tree.prompts[path]] += share * last
        states = [(old + new) / 2 for old, new in zip(states, following)]  # the mean, so that no cycle remains
    return sum(share * tree.tokens for share, tree in zip(states, trees))
