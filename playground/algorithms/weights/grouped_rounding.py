"""Rounding of weights to a grid of a few bits, with one scale for each group of consecutive inputs of a row."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from playground.errors import Refusal

WHOLE = 16  # bits at which nothing is rounded
SCALE_BITS = 16
SMALLEST = 1e-8  # scale of a group of zeros


@dataclass(frozen=True)
class RoundingGrid:
    """The values that weights [rows, group] may take. scale, zero: [rows, 1]; zero is 0 on a symmetric grid."""

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    @classmethod
    def of(cls, weights: Tensor, bits: int, symmetric: bool) -> RoundingGrid:
        """The grid that spans the weights of each row: nothing is clipped."""
        if symmetric:
            high = 2 ** (bits - 1) - 1
            scale = (weights.abs().amax(-1, keepdim=True) / high).clamp(min=SMALLEST)
            return cls(scale, torch.zeros_like(scale), -high, high)
        low, top = (edge.clamp(*limits) for edge, limits in (
            (weights.amin(-1, keepdim=True), (None, 0)), (weights.amax(-1, keepdim=True), (0, None))))
        scale = ((top - low) / (2 ** bits - 1)).clamp(min=SMALLEST)
        return cls(scale, (-low / scale).round(), 0, 2 ** bits - 1)

    def round(self, weights: Tensor) -> Tensor:
        """The nearest values of the grid."""
        codes = ((weights / self.scale).round() + self.zero).clamp(self.low, self.high)
        return (codes - self.zero) * self.scale


def rounded(weights: Tensor, bits: int, group: int, symmetric: bool) -> Tensor:
    """Weights [out, in] rounded in groups along their inputs; the last group may be shorter. One bit is the sign times
    the mean magnitude.
    """
    parts = weights.split(group_size(group, weights.shape[1]), -1)
    if bits == 1:
        return torch.cat([part.abs().mean(-1, keepdim=True) * torch.where(part < 0, -1.0, 1.0) for part in parts], -1)
    return torch.cat([RoundingGrid.of(part, bits, symmetric).round(part) for part in parts], -1)


def group_size(group: int, inputs: int) -> int:
    """The inputs of a group; 0 stands for all of a row. Raises Refusal for a row that is shorter."""
    if group > inputs:
        raise Refusal(f"A layer of this model has {inputs} inputs, too few for groups of {group}: choose a smaller "
                      "group.", "group")
    return group or inputs


def stored_bits(bits: int, group: int, inputs: int, symmetric: bool) -> float:
    """Bits of a weight with its share of scales and zero points."""
    groups = -(-inputs // group_size(group, inputs))
    each = SCALE_BITS if symmetric or bits == 1 else SCALE_BITS + bits
    return bits + each * groups / inputs
