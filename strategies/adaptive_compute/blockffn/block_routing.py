"""The router of BlockFFN, its experts as parts of a feed-forward network, and what counts as sparse."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import relu, silu

EPSILON = 1e-6


def gates(normed: Tensor, router: Tensor, norm: Tensor) -> Tensor:
    """Factors of the experts [..., experts] for states [..., d]: ReLU of the router's scores, then an RMS norm."""
    scores = relu(normed @ router.T)
    return norm * scores * torch.rsqrt(scores.square().mean(-1, keepdim=True) + EPSILON)


class BlockLayer:
    """The channels of a feed-forward network, expert by expert."""

    def __init__(self, projections: tuple[Tensor, Tensor, Tensor], order: Tensor, experts: int):
        """order: channels [k * experts], the first k of them those of the first expert."""
        gate, up, down = projections
        order = order.to(gate.device)
        self.gate, self.up = (weight[order].unflatten(0, (experts, -1)) for weight in (gate, up))  # [experts, k, d]
        self.down = down.T[order].unflatten(0, (experts, -1))

    def of(self, experts: Tensor, shares: Tensor) -> ChosenExperts:
        """Only these experts [m], with the factors [n, experts] of all of them for the rows."""
        return ChosenExperts(self, experts, shares)


@dataclass
class ChosenExperts:
    """Some experts of a layer, each computed once for all rows and multiplied by the row's factor."""

    layer: BlockLayer
    experts: Tensor
    shares: Tensor

    @property
    def weights(self) -> int:
        return 3 * len(self.experts) * self.layer.gate[0].numel()

    def __call__(self, hidden: Tensor) -> Tensor:
        down = self.layer.down[self.experts].flatten(0, 1)
        return self.activations(hidden) @ down

    def activations(self, hidden: Tensor) -> Tensor:
        """Channels of the experts times their factors, [n, m * k]."""
        gate, up = (weight[self.experts].flatten(0, 1) for weight in (self.layer.gate, self.layer.up))
        channels = silu(hidden @ gate.T) * (hidden @ up.T)
        factors = self.shares[:, self.experts].to(channels.dtype)
        return channels * factors.repeat_interleave(self.layer.gate.shape[1], 1)


def chunk_sparsity(active: Tensor, size: int) -> Tensor:
    """Mean share of the experts that no token of a chunk uses, for active [tokens, experts].

    An incomplete last chunk is left out. Size 1 is the sparsity of single tokens.
    """
    chunks = active[:len(active) // size * size].unflatten(0, (-1, size))
    return 1 - chunks.any(1).float().mean()
