"""CAST: weights that are trained into a sparse pattern."""
from __future__ import annotations

import torch
from torch import Tensor

from playground.algorithms.weights.pruning_masks import outside_pattern, pruned_bits
from playground.algorithms.weights.weight_training import WeightTraining, divergence, language_loss
from playground.contract import CalibratedChange, knob

GROUP = 4  # consecutive inputs, of which some are kept
REFRESH = 10  # steps between choices of what decays
SMALLEST = 0.1  # share of the mean size of gradients, below which decay grows no further


class CAST(CalibratedChange):
    """Train all weights while those outside a pattern such as 2:4 decay to zero, then prune what is left of them.

    The model computes with all its weights during the training. Every 10 steps the largest of each 4 consecutive
    inputs of a row are chosen anew; the others shrink by an L1 decay, which grows from step to step and is larger where
    gradients are small. The loss is that of the texts and the KL to the original. At the end each row is scaled up to
    the norm that it had before pruning. A reconstruction: the paper's formulas of the decay and the scaling are not
    known to us. It trains on billions of tokens; this is a small fit. Huang et al. 2025, arXiv 2509.25996.
    """

    name, title, paper, sheet = "cast", "CAST", "2509.25996", "weights/maskllm-cast-armor"
    adjective, guarantee, needs = "trained sparse by CAST", ("heuristic",), ("corpus",)
    reconstruction, sure = True, "low"

    kept: int = knob(2, 1, GROUP, step=1, help="inputs of every 4 that stay; 4 changes nothing")
    samples: int = knob(256, 1, 256, step=1, help="calibration texts")
    steps: int = knob(120, 0, 5000, step=10, help="of training; 0: pruning by magnitude, with scaled rows")
    rate: float = knob(0.0005, 0.000001, 0.01, help="step of Adam")
    decay: float = knob(12.0, 0.0, 100.0, help="of a weight with the mean gradient at the end, in steps of Adam")
    imitation: float = knob(1.0, 0.0, 10.0, help="weight of the KL to the original in the loss")

    def change(self, blocks):
        if self.kept == GROUP:
            return
        pattern = f"{self.kept}:{GROUP}"
        weights = {name: blocks.weight(name).clone().requires_grad_() for name in blocks.layers}

        def loss(over, ids):
            with torch.no_grad():
                original = blocks.logits(ids)
            logits = blocks.logits(ids, weights)
            return language_loss(logits, ids) + self.imitation * divergence(original, logits)

        optimiser = torch.optim.Adam(weights.values(), lr=self.rate)
        decay = SparseDecay(optimiser, pattern, self.decay / max(self.steps, 1))
        WeightTraining(blocks, self.steps).run(optimiser, loss, decay.after)
        for name, weight in weights.items():
            new = scaled(weight.detach(), pattern)
            blocks.put(name, new, pruned_bits(float((new == 0).float().mean()), pattern))


class SparseDecay:
    """L1 decay of weights outside the pattern, after each step of Adam. growth: of the decay with each step."""

    def __init__(self, optimiser: torch.optim.Adam, pattern: str, growth: float):
        self._optimiser, self._pattern, self._growth = optimiser, pattern, growth
        self._outside: list[Tensor] = []

    @torch.no_grad()
    def after(self, step: int) -> None:
        (group,) = self._optimiser.param_groups
        if step % REFRESH == 0:
            self._outside = [outside_pattern(weight.abs(), self._pattern) for weight in group["params"]]
        amount = group["lr"] * self._growth * (step + 1)
        for weight, outside in zip(group["params"], self._outside):
            sizes = self._optimiser.state[weight]["exp_avg_sq"].sqrt()
            relative = (sizes / sizes.mean().clamp(min=1e-30)).clamp(min=SMALLEST)
            shrunk = weight.abs() - amount / relative * outside
            weight.copy_(weight.sign() * shrunk.clamp(min=0))


def scaled(weight: Tensor, pattern: str) -> Tensor:
    """A matrix [out, in] pruned to the pattern, each row scaled to the norm that it had."""
    pruned = weight.masked_fill(outside_pattern(weight.abs(), pattern), 0)
    return pruned * (weight.norm(dim=1, keepdim=True) / pruned.norm(dim=1, keepdim=True).clamp(min=1e-8))
