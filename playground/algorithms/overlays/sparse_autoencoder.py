"""Sparse autoencoders: hidden states as sums of a few of many directions, called features.

Those trained here keep the largest features of each state (TopK, Gao et al. 2024, arXiv 2406.04093): with the L1
penalty of O'Neill and Bui 2024, arXiv 2405.12522, five times as many features explained less. Published ones may have a
threshold for each feature instead (JumpReLU).
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from playground.algorithms.kv_cache.cache_training import Descent, DescentState, descend
from playground.events import Figure, Note

FEATURES = 4  # features per number of a state
ACTIVE = 16  # features of a state
BATCH = 512  # states of a training step
PLAN = Descent("training loss of the autoencoder", 2000, 2e-3, every=100)


class SparseAutoencoder(NamedTuple):
    """f = act(x E^T + c), and x is about f D + b. A feature is active where it is above its threshold."""

    encoder: Tensor  # E, [features, d]
    bias: Tensor  # c, [features]
    decoder: Tensor  # D, [features, d]
    centre: Tensor  # b, [d]
    threshold: Tensor  # [features], 0 for a ReLU
    most: int = 0  # features that may be active at once; 0: any number

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> SparseAutoencoder:
        """From tensors of these names."""
        encoder, bias, decoder, centre, threshold = (weights[name].float() for name in cls._fields[:-1])
        return cls(encoder, bias, decoder, centre, threshold, int(weights["most"]))

    def tensors(self, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
        """What `of` reads. In float16, what is trained here explains as much."""
        parts = {name: getattr(self, name).to(dtype) for name in ("encoder", "decoder")}
        small = {name: getattr(self, name) for name in ("bias", "centre", "threshold")}
        return {**parts, **small, "most": torch.tensor(self.most)}

    def encode(self, states: Tensor) -> Tensor:
        """Activations [n, features] of states [n, d]."""
        sizes = states.float() @ self.encoder.T + self.bias
        active = torch.where(sizes > self.threshold, sizes, 0).clamp(min=0)
        if not self.most or self.most >= len(self.bias):
            return active
        kept = active.topk(self.most, 1)
        return torch.zeros_like(active).scatter(1, kept.indices, kept.values)

    def decode(self, activations: Tensor) -> Tensor:
        """States [n, d]."""
        return activations @ self.decoder + self.centre

    def to(self, device: torch.device) -> SparseAutoencoder:
        encoder, bias, decoder, centre, threshold = (getattr(self, name).to(device) for name in self._fields[:-1])
        return SparseAutoencoder(encoder, bias, decoder, centre, threshold, self.most)


class StateRows(NamedTuple):
    """Hidden states [n, d] with their mean [d], and the root of their mean square around it."""

    rows: Tensor
    mean: Tensor
    scale: float

    @classmethod
    def of(cls, rows: Tensor) -> StateRows:
        mean = rows.mean(0)
        return cls(rows, mean, float((rows - mean).square().mean().sqrt()))

    def batch(self, size: int, seed: int) -> Tensor:
        """Random rows, of mean 0 and mean square 1."""
        chosen = torch.randint(len(self.rows), (size,), generator=torch.Generator().manual_seed(seed))
        return (self.rows[chosen] - self.mean) / self.scale


def random_weights(width: int, seed: int, count: int = 0) -> dict[str, Tensor]:
    """Random unit directions, read and written alike, for states of mean square 1."""
    count = count or FEATURES * width
    directions = normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)))
    return {
        "encoder": directions.clone(), "bias": torch.zeros(count), "decoder": directions, "centre": torch.zeros(width),
    }


def unscaled(weights: Mapping[str, Tensor], states: StateRows) -> SparseAutoencoder:
    """The autoencoder of the states themselves, from weights for states of mean 0 and mean square 1."""
    encoder, centre = weights["encoder"].detach(), weights["centre"].detach()
    bias = states.scale * (weights["bias"].detach() - encoder @ centre) - encoder @ states.mean
    decoder = normalize(weights["decoder"].detach())
    none = torch.zeros_like(bias)
    return SparseAutoencoder(encoder, bias, decoder, states.scale * centre + states.mean, none, ACTIVE)


def train(states: StateRows, seed: int, state: DescentState) -> Iterator[Figure | Note]:
    """Train an autoencoder on hidden states and return it; resumable, and the same for the same seed."""
    weights = random_weights(states.rows.shape[1], seed)

    def loss(step: int) -> Tensor:
        rows = states.batch(BATCH, seed * 1_000_003 + step)
        active = ((rows - weights["centre"]) @ weights["encoder"].T + weights["bias"]).relu()
        kept = active.topk(min(ACTIVE, active.shape[1]), 1)
        found = torch.zeros_like(active).scatter(1, kept.indices, kept.values) @ normalize(weights["decoder"])
        return (found + weights["centre"] - rows).square().mean()

    yield from descend(weights, loss, PLAN, state)
    return unscaled(weights, states)


def principal_components(states: StateRows, count: int) -> Tensor:
    """The projection [d, d] onto the `count` directions in which the states vary most."""
    centred = (states.rows - states.mean).double()
    found = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -count:]
    return (found @ found.T).float()
