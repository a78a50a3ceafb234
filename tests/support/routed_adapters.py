"""Adapters at random, and the library's network with their dense products, multiplied row by row."""
from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import silu

from playground.algorithms.adaptive_compute.adapter_experts import MATRICES
from support.compute_runs import deep_network
from support.policy_fits import fitted_lane, greedy_text

LAYERS, WIDTH, CHANNELS, RANK = 6, 32, 48, 4
NAMES = ("facts", "lists", "sums")
SHAPES = {"gate": (CHANNELS, WIDTH), "up": (CHANNELS, WIDTH), "down": (WIDTH, CHANNELS)}


def experts_at_random(names: tuple[str, ...] = NAMES, seed: int = 3) -> dict[str, Tensor]:
    chance, found = torch.Generator().manual_seed(seed), {}
    for name in names:
        for matrix, (outputs, inputs) in SHAPES.items():
            sizes = {"a": (RANK, inputs), "b": (outputs, RANK), "gate": (inputs,)}
            found |= {f"{name}.{matrix}.{part}": 0.4 * torch.randn(LAYERS, *size, generator=chance, dtype=torch.double)
                      for part, size in sizes.items()}
    return found


def product(weights: dict, name: str, matrix: str, layer: int) -> Tensor:
    return weights[f"{name}.{matrix}.b"][layer] @ weights[f"{name}.{matrix}.a"][layer]


def softmax_of_best(scores: list[float], count: int) -> list[float]:
    best = sorted(range(len(scores)), key=lambda at: -scores[at])[:count]
    total = sum(math.exp(scores[at]) for at in best)
    return [math.exp(scores[at]) / total if at in best else 0.0 for at in range(len(scores))]


def standardised(vector: Tensor) -> Tensor:
    return (vector - vector.mean()) / (vector.var(unbiased=False) + 1e-5).sqrt()


def by_gate(weights, matrix, layer, row):
    gates = [weights[f"{name}.{matrix}.gate"][layer] for name in NAMES]
    scores = [float(standardised(row) @ standardised(gate)) / math.sqrt(len(row)) for gate in gates]
    return softmax_of_best(scores, 2)


def by_direction(weights, matrix, layer, row):
    directions = [torch.linalg.svd(product(weights, name, matrix, layer)).Vh[0] for name in NAMES]
    return softmax_of_best([abs(float(direction @ row)) for direction in directions], 2)


def evenly(weights, matrix, layer, row):
    return [1 / len(NAMES)] * len(NAMES)


def routed_network(weights: dict, weigh):
    network = deep_network()
    for layer, block in enumerate(network.model.layers):
        dense = dict(zip(MATRICES, (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj)))

        def multiplied(matrix, row, layer=layer, dense=dense):
            shares = weigh(weights, matrix, layer, row)
            own = sum(share * product(weights, name, matrix, layer) for share, name in zip(shares, NAMES))
            return (dense[matrix].weight + own) @ row

        def forward(x, multiplied=multiplied):
            return torch.stack([multiplied("down", silu(multiplied("gate", row)) * multiplied("up", row))
                                for row in x[0]])[None]

        block.mlp.forward = forward
    return network


def check_text(cls, weigh, monkeypatch) -> None:
    weights = experts_at_random()
    lane, _ = fitted_lane(cls(), weights, monkeypatch, 8)
    assert lane.tokens == greedy_text(routed_network(weights, weigh), 8)
