"""Training of what the weights of a network are made of, on the texts that a change is calibrated on.

The network's own tensors stay as they are: each forward gets other weights in their place.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

if TYPE_CHECKING:
    from playground.engine.weights.linear_blocks import LinearBlocks

Loss = Callable[[float, list[int]], Tensor]
"""From the share of the training that is over, 0 to 1, and a text: what is to become smaller."""


@dataclass
class WeightTraining:
    """A training by the loss of a whole network. together: texts of a step."""

    blocks: LinearBlocks
    steps: int
    together: int = 2
    seed: int = 0

    @torch.inference_mode(False)
    @torch.enable_grad()
    def run(self, optimiser: torch.optim.Optimizer, loss: Loss, after: Callable[[int], None] = lambda step: None
            ) -> None:
        """Take all steps, each on the mean loss of some texts; `after` is called with the number of each, from 0."""
        texts = self._passes()
        for step in range(self.steps):
            self.blocks.progress(step / self.steps, f"Training weights: step {step + 1} of {self.steps}")
            optimiser.zero_grad()
            for _ in range(self.together):
                (loss(step / self.steps, next(texts)) / self.together).backward()
            optimiser.step()
            after(step)

    def _passes(self) -> Iterator[list[int]]:
        """The texts in a random order, again and again."""
        chance, texts = Random(self.seed), list(self.blocks.texts)
        while True:
            chance.shuffle(texts)
            yield from texts


def language_loss(logits: Tensor, ids: list[int]) -> Tensor:
    """Mean negative log-probability of each token of a text after the first, in nats."""
    return cross_entropy(logits[:-1], torch.tensor(ids[1:], device=logits.device))


def divergence(original: Tensor, logits: Tensor) -> Tensor:
    """Mean KL of the next token from the original's logits [n, V], in nats."""
    return kl_div(logits.log_softmax(-1), original.log_softmax(-1), reduction="batchmean", log_target=True)
