"""EvoPress's evolutionary search for the attention blocks and FFNs whose absence changes a model least.

A state drops the same number of attention blocks and of FFNs. Offspring swap a dropped block for a kept one, so the
number never changes. They are compared on few tokens, the survivors on more. Sieberling et al. 2024, arXiv 2410.14649.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

Fitness = Callable[[list["Dropped"], int], list[float]]
"""Fitness of each state on so many fresh calibration tokens, the same for all of them; lower is better."""


class Dropped(NamedTuple):
    """Layers whose attention, and layers whose FFN, is left out."""

    attention: frozenset[int]
    ffn: frozenset[int]


@dataclass(frozen=True)
class SearchSizes:
    """Sizes of a search. The authors' are 64 random starts, 32 offspring, and stages of 2,048 and 32,768 tokens."""

    starts: int = 24
    start_tokens: int = 512
    offspring: int = 12
    stages: tuple[tuple[int, int], ...] = ((3, 512), (1, 2048))  # survivors and tokens
    generations: int = 10
    mutations: int = 3  # most swaps in one offspring


def random_state(depth: int, count: int, chance: Random) -> Dropped:
    return Dropped(*(frozenset(chance.sample(range(depth), count)) for _ in range(2)))


def mutated(state: Dropped, depth: int, most: int, chance: Random) -> Dropped:
    """A copy with up to `most` swaps, biased to few."""
    for _ in range(min(chance.randint(1, most), chance.randint(1, most))):
        which = chance.randrange(2)
        dropped = state[which]
        into = chance.choice([each for each in range(depth) if each not in dropped])
        swapped = dropped - {chance.choice(sorted(dropped))} | {into}
        state = Dropped(swapped, state.ffn) if which == 0 else Dropped(state.attention, swapped)
    return state


def search(depth: int, count: int, fitness: Fitness, sizes: SearchSizes, seed: int) -> Iterator[tuple[Dropped, float]]:
    """The best state of each generation with its fitness on the last stage's tokens; it drops `count` of either kind.

    0 < count < depth. A parent competes in the last stage, so a state is replaced only by one that was better.
    """
    chance = Random(seed)
    states = list(dict.fromkeys(random_state(depth, count, chance) for _ in range(sizes.starts)))
    parent = _fittest(states, 1, sizes.start_tokens, fitness)[0][0]
    for _ in range(sizes.generations):
        states = _offspring(parent, depth, sizes, chance)
        for index, (survivors, tokens) in enumerate(sizes.stages):
            last = index == len(sizes.stages) - 1
            ranked = _fittest([*states, parent] if last else states, survivors, tokens, fitness)
            states = [state for state, _ in ranked]
        parent = ranked[0][0]
        yield ranked[0]


def _offspring(parent: Dropped, depth: int, sizes: SearchSizes, chance: Random) -> list[Dropped]:
    """Different states, none of them the parent; fewer if there are not as many."""
    found: dict[Dropped, None] = {}
    for _ in range(8 * sizes.offspring):
        state = mutated(parent, depth, sizes.mutations, chance)
        if state != parent:
            found[state] = None
        if len(found) == sizes.offspring:
            break
    return list(found)


def _fittest(states: list[Dropped], survivors: int, tokens: int, fitness: Fitness) -> list[tuple[Dropped, float]]:
    ranked = sorted(zip(fitness(states, tokens), range(len(states))))
    return [(states[index], value) for value, index in ranked[:survivors]]
