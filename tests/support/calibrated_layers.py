"""A small layer and inputs for it, for changes of weights that are calibrated."""
from __future__ import annotations

import torch


def random_weights(out: int = 5, inputs: int = 12) -> torch.Tensor:
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(1))


def inputs(count: int = 60, width: int = 12) -> torch.Tensor:
    """Correlated inputs [n, in] of channels whose sizes differ."""
    chance = torch.Generator().manual_seed(2)
    mixed = torch.randn(count, width, generator=chance) @ torch.randn(width, width, generator=chance)
    return mixed * torch.linspace(0.2, 3.0, width)


def output_error(new: torch.Tensor, old: torch.Tensor, x: torch.Tensor) -> float:
    """The sum of squares of what changes in the outputs for inputs x."""
    return float(((new - old).double() @ x.double().T).square().sum())
