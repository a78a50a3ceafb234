"""Training of BlockFFN's routers for a finished model: experts are groups of its channels and stay as they are."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, normalize

from playground.algorithms.adaptive_compute.channel_groups import clustered
from playground.algorithms.adaptive_compute.policy_training import TextBatch, distillation, held_out_mean
from playground.algorithms.draft_heads.head_training import HeadTraining, trained
from playground.contract import LayerSteps
from playground.events import Note
from strategies.adaptive_compute.blockffn.block_routing import BlockLayer, chunk_sparsity, gates

EXPERTS = 48
# weights of the losses; the paper's are 2e-3, and 5e-2 that grows: routers of experts that are not trained need more
LOCALITY, CHUNKS = 2e-3, 6.0
LENGTH = 16  # tokens of a chunk; the paper's 64 are longer than most texts here
SHARPNESS = 100  # of the scores in the locality loss


class BlockRouters(nn.Module):
    """Routers of all layers over experts that are not trained."""

    def __init__(self, parts, orders: list[Tensor], experts: int):
        super().__init__()
        self.orders = torch.stack(orders)
        frozen = [tuple(weight.detach().clone().float() for weight in parts.ffn_projections(layer))
                  for layer in range(parts.depth)]
        self._layers = [BlockLayer(weights, order, experts) for weights, order in zip(frozen, orders)]
        means = [normalize(layer.gate.mean(1), dim=-1) for layer in self._layers]
        self.router, self.norm = nn.Parameter(torch.stack(means)), nn.Parameter(torch.ones(parts.depth, experts))
        self._all = torch.arange(experts)

    def scores(self, layer: int, normed: Tensor) -> Tensor:
        """What the ReLU gets, [..., experts]."""
        return normed @ self.router[layer].T

    def shares(self, layer: int, normed: Tensor) -> Tensor:
        return gates(normed, self.router[layer], self.norm[layer])

    def feed_forward(self, layer: int, normed: Tensor) -> Tensor:
        rows = normed.flatten(0, -2)
        return self._layers[layer].of(self._all, self.shares(layer, rows))(rows).view_as(normed)


class RoutedBlocks(LayerSteps):
    """Every feed-forward network is that of its experts."""

    def __init__(self, routers: BlockRouters):
        self._routers = routers
        self.inputs: list[Tensor] = []  # by layer, [texts, n, d]

    def feed_forward(self, layer, normed, own):
        self.inputs.append(normed)
        return self._routers.feed_forward(layer, normed)


class OwnNetworks(LayerSteps):
    """The model's own feed-forward networks, compared with those of the experts on the same states."""

    def __init__(self, routers: BlockRouters, real: Tensor):
        self._routers, self._real, self.errors = routers, real, []

    def feed_forward(self, layer, normed, own):
        added, found = own(normed)[self._real], self._routers.feed_forward(layer, normed[self._real][None])[0]
        self.errors.append((found - added).square().sum() / added.square().sum())
        return own(normed)


def train_blocks(texts, seed: int) -> Iterator:
    """Divide the channels, then train; yields figures and notes, and returns the weights by name."""
    routers = BlockRouters(texts.parts, channel_orders(texts.parts, seed), experts_of(texts.parts))
    steps = HeadTraining(epochs=1, rate=5e-3, names=("relative error",))
    yield from trained(routers, texts.phase("layers"), partial(layer_losses, texts, routers), steps)
    yield Note(measured(texts, routers, "after each layer by itself"))
    steps = HeadTraining(epochs=2, rate=5e-3, names=("divergence", "locality", "chunks"))
    yield from trained(routers, texts.phase("together"), partial(joint_losses, texts, routers), steps)
    yield Note(measured(texts, routers, "at the end"))
    return {"order": routers.orders.to(torch.int16), "router": routers.router.detach().half(),
            "norm": routers.norm.detach().half()}


def experts_of(parts) -> int:
    """Experts of a layer: as many as the paper's, or fewer for a narrow network."""
    return max(1, min(EXPERTS, parts.channels(0) // 4))


def channel_orders(parts, seed: int) -> list[Tensor]:
    """Channels of every layer, group by group."""
    orders = []
    for layer in range(parts.depth):
        rows = normalize(parts.ffn_projections(layer)[0].detach().clone().float(), dim=-1)
        orders.append(torch.cat(clustered(rows, experts_of(parts), torch.Generator().manual_seed(seed))))
    return orders


def layer_losses(texts, routers: BlockRouters, batch: TextBatch) -> list[Tensor]:
    """First phase: the experts of each layer reproduce its feed-forward network."""
    steps = OwnNetworks(routers, batch.real)
    texts.forward(batch.ids, steps)
    return [torch.stack(steps.errors).mean()]


def joint_losses(texts, routers: BlockRouters, batch: TextBatch) -> list[Tensor]:
    """Second phase: divergence from the model, and the two losses of sparsity, averaged over layers."""
    steps = RoutedBlocks(routers)
    moved = distillation(texts, batch, steps)
    pairs = list(enumerate(steps.inputs))
    local = [locality_loss(routers.scores(layer, normed), batch.real) for layer, normed in pairs]
    chunks = [chunk_loss(routers.shares(layer, normed), batch.real) for layer, normed in pairs]
    return [moved, LOCALITY * torch.stack(local).mean(), CHUNKS * torch.stack(chunks).mean()]


def locality_loss(scores: Tensor, real: Tensor) -> Tensor:
    """How much neighbouring tokens differ in which scores [texts, n, experts] are positive."""
    sharp, pairs = SHARPNESS * scores, real[:, 1:]
    return binary_cross_entropy_with_logits(sharp[:, :-1][pairs], torch.sigmoid(sharp[:, 1:][pairs]))


def chunk_loss(shares: Tensor, real: Tensor, length: int = LENGTH) -> Tensor:
    """Estimated share of the experts that a chunk of tokens uses, from factors [texts, n, experts]."""
    parts = shares / (shares.sum(-1, keepdim=True) + 1e-5)
    size = shares.shape[1] // length * length
    unused = torch.log((1 - parts[:, :size]).clamp(min=0) + 1e-5).unflatten(1, (-1, length)).sum(2).exp()
    whole = real[:, :size].unflatten(1, (-1, length)).all(2)
    return 1 - unused[whole].mean() if bool(whole.any()) else shares.sum() * 0


def measured(texts, routers: BlockRouters, when: str) -> str:
    """Sparsity and divergence on held-out texts, in words."""
    def measure(batch: TextBatch) -> Tensor:
        steps = RoutedBlocks(routers)
        divergence = distillation(texts, batch, steps)
        active = [routers.scores(layer, normed)[batch.real] > 0 for layer, normed in enumerate(steps.inputs)]
        sparse = [torch.stack([chunk_sparsity(each, size) for each in active]).mean() for size in (1, 8)]
        return torch.stack([divergence, *sparse])

    divergence, single, chunk = held_out_mean(texts, measure).tolist()
    return (f"Held-out texts {when}: {single:.3f} of the experts are off for a token, {chunk:.3f} for 8 in a row, KL "
            f"divergence {divergence:.4f}.")
