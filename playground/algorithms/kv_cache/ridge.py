"""Ridge regression in closed form, from sums over examples that are seen once."""
from __future__ import annotations

import torch
from torch import Tensor

PENALTY = 1.0  # on the squared weights, not on the bias: the default of scikit-learn, which NVIDIA fits KVzap with


class RidgeSums:
    """Sums of one regression, of constant size however many examples are added."""

    def __init__(self, inputs: int, outputs: int):
        self._squares = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)  # of the inputs and a one
        self._products = torch.zeros(inputs + 1, outputs, dtype=torch.float64)
        self._totals = torch.zeros(outputs, dtype=torch.float64)  # of the squared outputs

    @property
    def count(self) -> int:
        """Examples that were added."""
        return int(self._squares[-1, -1])

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Add examples: inputs [n, inputs] and outputs [n, outputs]."""
        inputs, outputs = inputs.double().cpu(), outputs.double().cpu()
        rows = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1)
        self._squares += rows.T @ rows
        self._products += rows.T @ outputs
        self._totals += outputs.square().sum(0)

    def solved(self, penalty: float = PENALTY) -> tuple[Tensor, Tensor]:
        """The weights [outputs, inputs] and biases [outputs] with the least squared error plus penalty."""
        kept = torch.full((len(self._squares),), penalty, dtype=torch.float64)
        kept[-1] = 0
        found = torch.linalg.solve(self._squares + kept.diag(), self._products)
        return found[:-1].T, found[-1]

    def explained(self, weight: Tensor, bias: Tensor) -> float:
        """The share of the outputs' variance that a map explains on these examples, averaged over the outputs."""
        map_ = torch.cat([weight.T, bias[None]])
        errors = self._totals - 2 * (map_ * self._products).sum(0) + (map_ * (self._squares @ map_)).sum(0)
        spread = self._totals - self._products[-1].square() / self._squares[-1, -1]
        return float((1 - errors / spread).mean())
