"""LQ-LoRA's decomposition: coarsely quantised weights, and a low-rank part for what rounding destroys."""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Normal

from playground.algorithms.weights.budgeted_choices import cheapest
from playground.contract import ChangedWeight, WeightChange, knob
from playground.errors import Refusal

BITS = (2, 3, 4, 8)  # that the program chooses from
BLOCK, SCALE_BITS, SCALES = 64, 8, 256  # weights with a scale, bits of a scale, and scales that share one of 32 bits
TAIL = 0.9677083  # the quantile at the end of the NormalFloat grid
OVERSAMPLING = 10


class Decomposition(NamedTuple):
    """What a matrix could become: its weights, the squared error, and the bits of all of it."""

    weight: Tensor
    error: float
    size: int


class LQLoRA(WeightChange):
    """Split each matrix into NormalFloat numbers of a few bits and a low-rank product in 16 bits, found in turn.

    The product is the best of its rank for what the rounding leaves, and the rounding is of what the product leaves,
    until the error grows; the best pair is kept. With a budget, a program gives every matrix 2, 3, 4 or 8 bits so that
    the sum of squared errors is least and all of it, the product's numbers included, stays within so many bits per
    weight. Scales take 8 bits each in blocks of 64. Left out of the paper: errors weighted by Fisher information, and
    the finetuning of the product afterwards. Guo et al. 2023, arXiv 2311.12023.
    """

    name, title, paper, sheet = "lq_lora", "LQ-LoRA decomposition", "2311.12023", "weights/lq-lora"
    adjective, guarantee = "split by LQ-LoRA", ("heuristic",)

    budget: float = knob(0.0, 0.0, 16.0, step=0.25, help="bits per weight over all layers; 0: the same bits everywhere")
    bits: int = knob(3, 2, 8, step=1, help="bits of every matrix, if there is no budget")
    rank: int = knob(8, 0, 64, step=1, help="of the product; 0: rounding alone")
    rounds: int = knob(10, 1, 100, step=1, help="at most, of product and rounding in turn")

    def changed(self, weight, inputs):
        choice = self.choice(weight, self.bits)
        return ChangedWeight(choice.weight, choice.size / weight.numel())

    def change(self, blocks):
        if not self.budget:
            return super().change(blocks)
        names = [name for block in blocks for name in block.layers]
        choices = [[self.choice(blocks.weight(name), bits) for bits in BITS] for name in names]
        budget = self.budget * sum(blocks.weight(name).numel() for name in names)
        numbers = cheapest([[each[1:] for each in own] for own in choices], budget)
        if not numbers:
            smallest = sum(min(each.size for each in own) for own in choices)
            raise Refusal(f"The smallest decomposition takes {smallest / budget:.2f} times the budget: raise it, or "
                          "lower the rank.", "budget")
        for name, own, number in zip(names, choices, numbers):
            blocks.put(name, own[number].weight, own[number].size / own[number].weight.numel())

    def choice(self, weight: Tensor, bits: int) -> Decomposition:
        """The best decomposition of a matrix [out, in] that was found in all rounds."""
        rank = min(self.rank, *weight.shape)
        best = min(self._rounds(weight, bits, rank), key=lambda found: found[1])
        return Decomposition(*best, stored_bits(weight, bits) + 16 * rank * sum(weight.shape))

    def _rounds(self, weight: Tensor, bits: int, rank: int) -> Iterator[tuple[Tensor, float]]:
        """Sums of both parts and their squared errors, until these grow."""
        chance, quantised, before = torch.Generator().manual_seed(0), torch.zeros_like(weight), math.inf
        for _ in range(self.rounds):
            product = low_rank(weight - quantised, rank, chance)
            quantised = normal_float(weight - product, bits)
            error = float((weight - product - quantised).square().sum())
            yield product + quantised, error
            if error > before or not rank:
                return
            before = error


def normal_float(weight: Tensor, bits: int) -> Tensor:
    """The nearest NormalFloat numbers, in blocks of 64 with a scale of 8 bits each; the last block may be shorter."""
    flat = weight.flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = rounded_scales(blocks.abs().amax(-1, keepdim=True)).clamp(min=1e-8)
    grid = levels(bits).to(weight)
    above = torch.bucketize(blocks / scales, (grid[1:] + grid[:-1]) / 2)
    return (grid[above] * scales).flatten()[:len(flat)].view_as(weight)


def levels(bits: int) -> Tensor:
    """The values of NormalFloat: quantiles of a normal distribution, 0 among them, the largest of magnitude 1."""
    half = 2 ** (bits - 1)
    low, high = torch.linspace(1 - TAIL, 0.5, half), torch.linspace(0.5, TAIL, half + 1)[1:]
    values = Normal(0.0, 1.0).icdf(torch.cat([low, high]))
    return values / values.abs().max()


def rounded_scales(scales: Tensor) -> Tensor:
    """Scales [blocks, 1] in 8 bits: steps above the smallest of the matrix, of a size for every 256 of them."""
    lowest = scales.min()
    parts = (scales - lowest).split(SCALES)
    steps = [(part.max() / (2 ** SCALE_BITS - 1)).clamp(min=1e-12) for part in parts]
    return torch.cat([(part / step).round() * step for part, step in zip(parts, steps)]) + lowest


def stored_bits(weight: Tensor, bits: int) -> int:
    """Bits of a matrix: its numbers, the scales of blocks, those of 256 scales, and the smallest scale."""
    blocks = -(-weight.numel() // BLOCK)
    return weight.numel() * bits + blocks * SCALE_BITS + -(-blocks // SCALES) * 32 + 32


def low_rank(weight: Tensor, rank: int, chance: torch.Generator) -> Tensor:
    """The best matrix of a rank, from a randomised singular value decomposition; zeros for rank 0."""
    if not rank:
        return torch.zeros_like(weight)
    width = min(rank + OVERSAMPLING, *weight.shape)
    sketch = weight @ torch.randn(weight.shape[1], width, generator=chance).to(weight)
    for _ in range(2):  # power iterations, since the values fall slowly
        sketch = weight @ (weight.T @ torch.linalg.qr(sketch).Q)
    basis = torch.linalg.qr(sketch).Q
    left, values, right = torch.linalg.svd(basis.T @ weight, full_matrices=False)
    return (basis @ left[:, :rank] * values[:rank]) @ right[:rank]
