"""Lanes with a cache policy, and independent implementations of policies."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from pairs import network, pair
from tables import watch
from transformers import DynamicCache

from playground.contract import CachePolicy, Drafter, Held, make
from playground.contract.assembly import Assembly
from playground.contract.token_tree import TokenTree
from playground.decoding.limits import Limits
from playground.decoding.rng import Draws
from support.kv_caches import exact_softmax

PROMPT = [54, 71, 71, 54, 9, 71, 71, 200, 13, 54, 80, 71, 100, 9, 9, 31, 54, 71, 120, 7, 88, 41]
LENGTH = 10
LivePositions = list[list[set[int]]]
"""Live positions by layer and KV head."""


def alone(policy: CachePolicy, decoder: str = "greedy") -> Assembly:
    return Assembly(make(decoder), cache_policy=policy)


def models(architecture: str = "llama") -> dict:
    both = pair(architecture)
    return {"target": both.target, "draft": both.draft}


def live_positions(lane) -> LivePositions:
    store = lane.target.store
    rows = [store.slots_of(layer).positions.expand(store.heads, -1).tolist() for layer in range(store.depth)]
    return [[{p for p in head if p >= 0} for head in layer] for layer in rows]


def course(
    assembly: Assembly, speakers: dict, prompt: list[int] = PROMPT, forced: tuple[int, ...] = ()
) -> tuple[list[int], list[LivePositions]]:
    """A lane's tokens, and its live positions after every commit."""
    found: list[LivePositions] = []
    for lane in watch(assembly, speakers, prompt, Limits(0, LENGTH, forced=forced), Draws(0)):
        if lane.generated > len(found):
            found += [live_positions(lane)] * (lane.generated - len(found))
    return lane.tokens[len(prompt):], found


Rule = Callable[[dict[int, float], list[int], int], set[int]]
"""rule(votes by position, live positions, tokens read) -> positions that stay."""


@dataclass
class ByHand:
    """Greedy decoding with the library's cache, from which positions are evicted after each forward."""

    architecture: str
    rule: Rule
    window: int | None = None  # last query positions of the prompt that are observed; None: all
    live: list[list[list[int]]] = field(default_factory=list)
    votes: list[list[dict[int, float]]] = field(default_factory=list)
    read: int = 0

    @torch.inference_mode()
    def write(self, prompt: list[int], length: int) -> tuple[list[int], list[LivePositions]]:
        self.network = network(self.architecture)
        self.network.set_attn_implementation("eager")
        self.cache = DynamicCache()
        ids, held = [self._feed(prompt)], [self._live_positions()]
        while len(ids) < length:
            ids.append(self._feed(ids[-1:]))
            held.append(self._live_positions())
        return ids, held

    def _live_positions(self) -> LivePositions:
        return [[set(head) for head in layer] for layer in self.live]

    def _feed(self, tokens: list[int]) -> int:
        first, self.read = self.read, self.read + len(tokens)
        places = torch.arange(first, self.read)[None]
        # everything, whatever each layer has left
        seen = None if not first else torch.zeros(1, 1, 1, 1, dtype=torch.float64)
        with exact_softmax():
            out = self.network(
                input_ids=torch.tensor([tokens]),
                position_ids=places,
                attention_mask=seen,
                past_key_values=self.cache,
                output_attentions=True,
            )
        for layer, weights in enumerate(out.attentions):
            self._settle(layer, weights[0], places[0].tolist())
        return int(out.logits[0, -1].argmax())

    def _settle(self, layer: int, weights: torch.Tensor, places: list[int]) -> None:
        pool, heads = self.cache.layers[layer], self.cache.layers[layer].keys.shape[1]
        if layer == len(self.live):
            self.live.append([[] for _ in range(heads)])
            self.votes.append([{} for _ in range(heads)])
        voting = weights if self.window is None else weights[:, -self.window:] if len(places) > 1 else weights[:, :0]
        kept = []
        for head, cast in enumerate(voting.unflatten(0, (heads, -1)).sum((1, 2)).tolist()):
            live, votes = self.live[layer][head] + places, self.votes[layer][head]
            for position, vote in zip(live, cast):
                votes[position] = votes.get(position, 0.0) + vote
            stays = self.rule(votes, live, self.read)
            kept.append([slot for slot, position in enumerate(live) if position in stays])
            self.live[layer][head] = [position for position in live if position in stays]
        index = torch.tensor(kept)[None, :, :, None].expand(1, -1, -1, pool.keys.shape[3])
        pool.keys, pool.values = pool.keys.gather(2, index), pool.values.gather(2, index)


def heavy_hitters(heavy: int, recent: int) -> Rule:
    def rule(votes, live, read):
        late = {p for p in live if p >= read - recent}
        return late | set(sorted(set(live) - late, key=lambda p: (votes[p], p), reverse=True)[:heavy])
    return rule


def held(positions: list, next: int, prompt: int = 0) -> Held:
    return Held(0, 1, "keep", prompt, next, torch.tensor(positions), read=None)


def stays(policy: CachePolicy, *about, **more) -> list[list[int]]:
    what = held(*about, **more)
    kept = policy.retain(what) & what.live
    positions = what.positions.expand_as(kept)
    return [row[chosen].tolist() for row, chosen in zip(positions, kept)]


class Wrong(Drafter):
    """Draft tokens that are never accepted: one more than plain decoding's token."""

    def propose(self, lm, budget):
        tree = TokenTree(source="wrong")
        rows = yield lm.extend(tree)
        for _ in range(min(budget, 3)):
            tree.add((rows.best() + 1) % lm.vocabulary, len(tree) - 1)
        return tree


def uneven(layers: int, length: int, seed: int = 0) -> torch.Tensor:
    """Attention scores of layers with increasingly concentrated attention, [layers, length]."""
    votes = torch.rand(layers, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return votes ** torch.arange(1, layers + 1)[:, None]


BY_HAND = ("llama", "qwen3", "gpt_neox", "gpt2")
