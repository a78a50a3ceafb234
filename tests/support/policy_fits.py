"""Lanes whose compute policy finds given weights, and short texts to train on."""
from __future__ import annotations

import random

import torch
from runs import run

from playground.contract import ComputePolicy, make
from playground.contract.assembly import Assembly
from support.compute_runs import PROMPT, deep


def fitted_lane(policy: ComputePolicy, weights: dict, monkeypatch, length: int = 12, decoder: str = "greedy"):
    """The lane of a policy for which these weights were stored, and its events."""
    from playground.decoding import fitted_weights as fitted
    monkeypatch.setattr(fitted, "find_all", lambda parts, models, given=None: {part.name: weights for part in parts})
    return run(Assembly(make(decoder), compute_policy=policy), {"target": deep()}, PROMPT, length)


@torch.no_grad()
def greedy_text(network, length: int = 12) -> list[int]:
    """Prompt and greedy text of a network of the library, read anew for every token."""
    ids = list(PROMPT)
    for _ in range(length):
        ids.append(int(network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


def finished(events) -> tuple[dict, list]:
    """What a training returned, and the events it yielded."""
    seen = []
    while True:
        try:
            seen.append(next(events))
        except StopIteration as end:
            return end.value, seen


def training_texts(count: int = 12, length: int = 24) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(60) for _ in range(length - number % 12)] for number in range(count)]
