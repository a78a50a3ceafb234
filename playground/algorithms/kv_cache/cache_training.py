"""Gradient descent for what policies and overlays learn, seeded, with a loss figure, resumed after an interruption."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from playground.events import Figure, Note


class DescentState(Protocol):
    """Where a training keeps what it needs to go on."""

    def resumed(self) -> dict | None:
        """What was saved; None if there is nothing."""

    def save(self, state: dict) -> None:
        """Save a state."""


@dataclass(frozen=True)
class Descent:
    """Adam with a linear decay to a tenth of the learning rate, over gradients of at most the norm `clip`."""

    title: str  # of the figure
    steps: int
    rate: float
    every: int = 25  # steps between two measurements
    clip: float = math.inf


def descend(
    weights: dict[str, Tensor], loss: Callable[[int], Tensor], plan: Descent, state: DescentState
) -> Iterator[Figure | Note]:
    """Train `weights` in place; loss(step) must depend on them and on the step alone.

    Yields the mean loss since the last measurement.
    """
    for tensor in weights.values():
        tensor.requires_grad_()
    optimiser = torch.optim.Adam(weights.values(), plan.rate)
    first, recent = _resumed(weights, optimiser, state), []
    if first:
        yield Note(f"Resumed after step {first} of {plan.steps}.")
    for step in range(first, plan.steps):
        optimiser.param_groups[0]["lr"] = plan.rate * (1 - 0.9 * step / plan.steps)
        optimiser.zero_grad()
        value = loss(step)
        value.backward()
        clip_grad_norm_(weights.values(), plan.clip)
        optimiser.step()
        recent.append(float(value.detach()))
        if (step + 1) % plan.every == 0 or step + 1 == plan.steps:
            saved = {name: tensor.detach() for name, tensor in weights.items()}
            state.save({"weights": saved, "optimiser": optimiser.state_dict(), "step": step + 1})
            yield Figure("scalar", plan.title, {"x": step + 1, "series": {"loss": sum(recent) / len(recent)}})
            recent = []
    for tensor in weights.values():
        tensor.requires_grad_(False)


def _resumed(weights: dict[str, Tensor], optimiser: torch.optim.Optimizer, state: DescentState) -> int:
    """The first step, after the weights and the optimiser were set to what was saved."""
    saved = state.resumed()
    if saved is None or saved["weights"].keys() != weights.keys():
        return 0
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(saved["weights"][name])
    optimiser.load_state_dict(saved["optimiser"])
    return saved["step"]
