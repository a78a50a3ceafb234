"""Independent implementations of cache policies that merge."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tables import watch
from torch import Tensor

from playground.algorithms.kv_cache.slot_merging import merge_by_mean
from playground.contract import Merge
from playground.contract.assembly import Assembly
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from playground.engine.cache.kv_buffer import MergeMap
from support.budget_policies import HandRule
from support.eviction import LENGTH, PROMPT, LivePositions, live_positions, models

BY_HAND = ("llama", "qwen3", "gpt_neox", "gpt2")
NEAR = 1e-9
ALL_LAYERS = {"first": 0, "last": 0}
D2O_TIGHT = {**ALL_LAYERS, "heavy": 0.4, "recent": 0.14, "sinks": 7}


@dataclass
class Room:
    """The cache of a lane at its end: positions, and keys and values by layer, [kv_heads, slots, d]."""

    ids: list[int]
    course: list[LivePositions]
    rows: list[Tensor]

    def off(self, other: Room) -> float:
        """Largest difference of a number, where both hold the same tokens."""
        return max(float((ours - theirs).abs().max()) for ours, theirs in zip(self.rows, other.rows))


def room(assembly: Assembly, architecture: str = "llama") -> Room:
    found: list[LivePositions] = []
    for lane in watch(assembly, models(architecture), PROMPT, Limits(0, LENGTH), Draws(0)):
        if lane.generated > len(found):
            found += [live_positions(lane)] * (lane.generated - len(found))
    store = lane.target.store
    held = [
        pools[layer].read(store.slots_of(layer).count)
        for pools in (store.keys, store.values)
        for layer in range(store.depth)
    ]
    return Room(lane.tokens[len(PROMPT):], found, held)


def room_by_hand(architecture: str, rule: Callable) -> Room:
    hand = HandRule(architecture, rule)
    rule.hand = hand
    ids, held = hand.write(PROMPT, LENGTH)
    layers = hand.cache.layers
    return Room(ids, held, [layer.keys[0] for layer in layers] + [layer.values[0] for layer in layers])


def the_same(one: Room, other: Room) -> bool:
    return one.ids == other.ids and one.course == other.course and one.off(other) < NEAR


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def mixed(parts: list[Tensor], slot: int, sources: list[int], weights: list[float]) -> None:
    """The rows of a slot become a sum over sources, of keys and values alike."""
    for rows in parts:
        rows[slot] = sum(weight * rows[source] for source, weight in zip(sources, weights))


def alike_in_weight(meeting: MergeMap) -> Merge:
    """Merged slots have equal weights."""
    return merge_by_mean(meeting, torch.ones(len(meeting.into)), torch.ones(len(meeting.targets[0])))
