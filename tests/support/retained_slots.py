"""Caches of which some slots are evicted."""
from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel

from playground.engine.attention.attention_mask import EMPTY, Slots
from playground.engine.cache.kv_cache import KVCache
from playground.engine.model import Model
from support.kv_caches import twins, words

HEARING = ("llama", "qwen3", "gemma2", "mistral", "gpt_neox", "gpt2", "cohere")
ROOM = 64  # positions of the longest text here


@pytest.fixture(scope="module", params=HEARING)
def pair(request) -> tuple[Model, PreTrainedModel]:
    return twins(request.param)


@pytest.fixture(scope="module")
def llama() -> tuple[Model, PreTrainedModel]:
    return twins("llama")


def grow(chance: random.Random, text: list[int], store: KVCache, feed_more) -> Iterator[None]:
    """Grow random trees over several forwards each, and commit a random node of each."""
    guesses: list[int] = []
    while len(text) < ROOM - 20:
        for _ in range(chance.randrange(1, 4)):
            new = words(chance.random(), chance.randrange(1, 4))
            parents = [chance.randrange(-1, node) for node in range(len(guesses), len(guesses) + len(new))]
            feed_more(new, parents)
            guesses += new
        node = chance.randrange(-1, len(guesses))
        text += [guesses[i] for i in store.path(node)]
        guesses = [guesses[i] for i in store.commit(node)]
        if not guesses or chance.random() < 0.3:
            store.crop_scratch()
            guesses = []
        yield


def mask(store: KVCache, live: torch.Tensor) -> None:
    """Mask slots instead of evicting them; live [layers, kv_heads, positions]."""
    layers = [store.slots_of(layer) for layer in range(store.depth)]
    store.slots = [
        Slots(slots.positions.expand(store.heads, -1).masked_fill(~staying(slots, live[i]), EMPTY), dense=False)
        for i, slots in enumerate(layers)
    ]


def evict(store: KVCache, live: torch.Tensor) -> None:
    store.evict([staying(store.slots_of(layer), live[layer]) for layer in range(store.depth)])


def staying(slots: Slots, live: torch.Tensor) -> torch.Tensor:
    positions = slots.positions.expand(len(live), -1)
    return live.gather(1, positions.clamp(min=0)) & (positions != EMPTY)


@dataclass
class Both:
    """Two KV caches that commit the same nodes."""

    one: KVCache
    other: KVCache

    def path(self, node: int) -> list[int]:
        return self.one.path(node)

    def commit(self, node: int) -> list[int]:
        self.other.commit(node)
        return self.one.commit(node)

    def crop_scratch(self) -> None:
        self.one.crop_scratch()
        self.other.crop_scratch()
