"""States that a policy holds, and a budget kept by hand."""
from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from playground.contract import Held
from support.budget_policies import best

HEADS, D, GROUP, ROWS = 2, 4, 2, 7
Vector = list[float]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2


def held(seed: int, slots: int = 13) -> Held:
    """Random states; in odd cases the second head holds fewer tokens, and what is in its empty slots is left over."""
    states = {"keys": drawn(seed, HEADS, slots, D) * 3, "values": drawn(seed + 50, HEADS, slots, D)}
    positions = [list(range(slots)), list(range(slots))]
    if seed % 2:
        positions[1] = [*range(1, slots - 2), -1, -1, -1]
        for part in states.values():
            part[1, -3:] = float("nan")
    return Held(0, 1, "keep", slots, slots, torch.tensor(positions), read=states.__getitem__)


CASES = [held(seed) for seed in range(6)]
Scores = Callable[[dict[int, tuple[Vector, Vector]], int], dict[int, float]]
"""scores(states by position: key and value, head) -> score by position."""


def by_hand(what: Held, size: int, scores: Scores) -> list[set[int]]:
    heads = []
    for head, row in enumerate(what.positions.tolist()):
        keys, values = (what.read(part)[head].tolist() for part in ("keys", "values"))
        states = {p: (key, value) for p, key, value in zip(row, keys, values) if p >= 0}
        heads.append(best(scores(states, head), size))
    return heads


def stays(policy, what: Held) -> list[set[int]]:
    kept = policy.retain(what) & what.live
    return [set(row[chosen].tolist()) for row, chosen in zip(what.positions, kept)]


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b))


# --- LagKV ---

def soft(xs: Vector) -> Vector:
    weights = [math.exp(x - max(xs)) for x in xs]
    return [weight / sum(weights) for weight in weights]


# --- Q-Filters ---

QUERIES = drawn(90, HEADS, GROUP, ROWS, D)


def observed(policy):
    """The policy after it has seen the prompt's queries in two pieces."""
    for piece in QUERIES.split([3, ROWS - 3], 2):
        policy.observe_queries(0, piece)
    return policy
