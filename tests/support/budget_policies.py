"""Independent implementations of cache policies with a budget."""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from registry import Collapse

from playground.contract.lane_config import LaneConfig
from playground.events import Cache
from playground.trace.cache_contents import Live
from support.eviction import ByHand

BY_HAND = ("llama", "qwen3", "gpt_neox", "gpt2")
TEXT = "The green bird sings, and the red fox listens."
TREE = LaneConfig("speculative", {}, [("draft_model", {"width": 2, "depth": 3})])
TIGHT = {"tova": {"size": 9}, "key_norm": {"size": 9, "recent": 2}, "random_keep": {"size": 9, "recent": 2},
         "pyramidkv": {"window": 3, "capacity": 9, "beta": 3}, "dapq": {"capacity": 9, "pretending": 5, "recent": 2},
         "prefixkv": {"keep": 0.5, "tail": 4}}
ROW_WISE = {"oracle_keep": {"size": 5}, "sink_window": {"sinks": 2, "window": 5, "positions": "renumbered"}}


def with_policy(lane: LaneConfig, name: str, **knobs) -> LaneConfig:
    return replace(lane, extras=[*lane.extras, (name, knobs)])


def roomy(name: str, **knobs) -> list[Collapse]:
    """Token by token, and a tree at a time: with a budget for the whole text nothing changes."""
    return [Collapse(with_policy(plain, name, **knobs), plain) for plain in (LaneConfig("greedy"), TREE)]


@dataclass
class Seen:
    """One layer after a forward, as the library has it."""

    layer: int
    weights: torch.Tensor  # of the new rows, [heads, rows, slots]
    keys: torch.Tensor  # [kv_heads, slots, d]
    live: list[list[int]]  # positions of the slots, by KV head
    read: int  # tokens


class HandRule(ByHand):
    """The rule is applied layer by layer: rule(seen) -> live positions, by KV head."""

    def _settle(self, layer, weights, places):
        pool = self.cache.layers[layer]
        if layer == len(self.live):
            self.live.append([[] for _ in range(pool.keys.shape[1])])
        live = [[*head, *places] for head in self.live[layer]]
        stays = self.rule(Seen(layer, weights, pool.keys[0], live, self.read))
        kept = torch.tensor([[slot for slot, p in enumerate(head) if p in chosen] for head, chosen in zip(live, stays)])
        index = kept[None, :, :, None].expand(1, -1, -1, pool.keys.shape[3])
        pool.keys, pool.values = pool.keys.gather(2, index), pool.values.gather(2, index)
        self.live[layer] = [[head[slot] for slot in row] for head, row in zip(live, kept.tolist())]


def best(scores: dict[int, float], count: int) -> set[int]:
    return set(sorted(scores, key=lambda p: (scores[p], p), reverse=True)[:count])


def cache_positions(cache: Cache, live: Live) -> list[set[int]]:
    """Positions held by each layer and head; in `live` one layer or head may represent all."""
    layers = live * (cache.layers if len(live) == 1 else 1)
    heads = [heads * (cache.heads if len(heads) == 1 else 1) for heads in layers]
    return [{p for start, stop in runs for p in range(start, stop)} for layer in heads for runs in layer]