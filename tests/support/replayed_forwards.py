"""A recorder that replays forwards without their Python code."""
from __future__ import annotations

import random

import pytest
import torch
from architectures import tiny
from toys import byte_tokenizer

import playground.engine.graphs.graph_sizes as sizes
from playground.engine.forward_input import ForwardInput
from playground.engine.model import Model
from support.kv_caches import chain, words
from support.recorded_forwards import recorded

EXACT = 1e-12
KINDS = ("llama", "qwen3")


@pytest.fixture(scope="module", params=KINDS)
def pair(request) -> tuple[Model, Model]:
    """A model that replays, and an equal one that does not."""
    return recorded(request.param), Model(tiny(request.param), byte_tokenizer(), request.param)


@pytest.fixture
def small_rooms(monkeypatch):
    """Buffers so small that a short text outgrows several."""
    monkeypatch.setattr(sizes, "MIN_CAPACITY", 16)


class Both:
    """A text in two caches, one replayed and one eager; `worst` is the largest difference so far."""

    def __init__(self, pair: tuple[Model, Model]):
        self.models, self.stores = pair, [model.new_store() for model in pair]
        self.worst, self.tokens = 0.0, 0

    def feed(self, tokens: list[int], parents: list[int], **how) -> None:
        one, other = (
            model.forward([ForwardInput(store, tokens, parents, **how)])[0][0]
            for model, store in zip(self.models, self.stores)
        )
        self.worst = max(self.worst, distance(one, other))

    def read(self, count: int, seed: int = 1) -> Both:
        self.feed(words(seed, count), chain(count))
        return self.each("commit", count - 1)

    def each(self, act: str, *arguments) -> Both:
        for store in self.stores:
            getattr(store, act)(*arguments)
        return self


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference; infinite for nan."""
    return float((one - other).abs().nan_to_num(nan=float("inf")).max())


def wander(both: Both, seed: int, acts: int = 40, longest: int = 60) -> Both:
    """Random trees, chains and forks; some nodes are committed, some dropped, and some tokens rolled back."""
    chance, store = random.Random(seed), both.stores[0]
    for _ in range(acts):
        act = chance.choice(["chain", "tree", "fork", "commit", "prune", "roll back", "crop"])
        held = len(store.parents)
        if act in ("chain", "tree", "fork") and store.length + max([0, *store.depths]) < longest:
            count, leaf = chance.randrange(1, 9), chance.randrange(-1, held)
            parents = {"chain": [leaf, *range(held, held + count - 1)], "fork": [leaf] * count,
                       "tree": [leaf, *(chance.randrange(held, held + i) for i in range(1, count))]}[act]
            both.feed(words(chance.random(), count), parents, last_only=chance.random() < 0.3,
                      expected=chance.choice(["", "best"]))
        elif act == "commit" and held:
            both.each("commit", chance.randrange(held))
        elif act == "prune" and held:
            both.each("prune", store.path(chance.randrange(held)))
        elif act == "roll back" and store.length:
            both.each("roll_back", chance.randrange(1, min(6, store.length) + 1))
        elif act == "crop":
            both.each("crop_scratch")
    return both
