"""Training of Duo-LLM beside a finished model: small feed-forward networks under random routes, then routers."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from playground.algorithms.adaptive_compute.policy_training import (
    TextBatch,
    distillation,
    divergence,
    held_out_mean,
    next_token_loss,
)
from playground.algorithms.draft_heads.head_training import HeadTraining, trained
from playground.contract import LayerSteps
from playground.events import Note

TARGETS = (0.25, 0.4, 0.5)
LARGE = 0.5  # probability of the large network in the first stage
BUDGET = 4.0  # weight of the squared distance to the target
TEMPERATURES = (1.0, 0.3)  # of the routers, one phase each


class SmallNetworks(nn.Module):
    """A narrow gated feed-forward network for every layer, which starts as the widest channels of the large one."""

    def __init__(self, parts, share: int):
        super().__init__()
        picked = [_widest(parts, layer, share) for layer in range(parts.depth)]
        self.gate, self.up, self.down = (nn.Parameter(torch.stack(each)) for each in zip(*picked))

    def forward(self, layer: int, normed: Tensor) -> Tensor:
        return (silu(normed @ self.gate[layer].T) * (normed @ self.up[layer].T)) @ self.down[layer].T

    def stored(self) -> dict[str, Tensor]:
        return {f"small.{name}": weight.detach().half() for name, weight in self.named_parameters()}


def _widest(parts, layer: int, share: int) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = (weight.detach().clone().float() for weight in parts.ffn_projections(layer))
    kept = down.norm(dim=0).topk(max(1, len(gate) // share)).indices
    return gate[kept], up[kept], down[:, kept]


class RandomRoutes(LayerSteps):
    """Every token takes the large network of a layer with probability LARGE."""

    def __init__(self, small: SmallNetworks, large: float = LARGE):
        self._small, self._large = small, large

    def feed_forward(self, layer, normed, own):
        takes = torch.rand(normed.shape[:-1]) < self._large
        return torch.where(takes[..., None], own(normed), self._small(layer, normed))


class SizeRouters(nn.Module):
    """Scores of the large and the small network, from what the networks read."""

    def __init__(self, depth: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(depth, 2, width) * 0.01)

    def forward(self, layer: int, normed: Tensor) -> Tensor:
        """Scores [..., 2]: large, small."""
        return normed @ self.weight[layer].T


class SoftRoutes(LayerSteps):
    """Both networks, mixed by the router's probabilities; or the likelier one, if `temperature` is None."""

    def __init__(self, small: SmallNetworks, routers: SizeRouters, real: Tensor, temperature: float | None):
        self._small, self._routers, self._real, self._temperature = small, routers, real, temperature
        self.large: list[Tensor] = []  # probability of the large network by layer, [tokens]

    def feed_forward(self, layer, normed, own):
        scores = self._routers(layer, normed)
        if self._temperature is None:
            shares = nn.functional.one_hot(scores.argmax(-1), 2).to(scores.dtype)
        else:
            shares = (scores / self._temperature).softmax(-1)
        self.large.append(shares[..., 0][self._real])
        return shares[..., :1] * own(normed) + shares[..., 1:] * self._small(layer, normed)


def train_duo(texts, share: int) -> Iterator:
    """Both stages; yields figures and notes, and returns the weights by name."""
    small = SmallNetworks(texts.parts, share)
    steps = HeadTraining(epochs=2, rate=2e-3, names=("divergence", "next-token loss"))
    yield from trained(small, texts.phase("small"), partial(small_losses, texts, small), steps)
    small.requires_grad_(False)
    for large in (0.0, 0.5):
        routes = RandomRoutes(small, large)
        mixture = held_out_mean(texts, lambda batch, routes=routes: distillation(texts, batch, routes))
        yield Note(f"Large networks taken with probability {large}: KL divergence {mixture:.4f} on held-out texts.")
    found = small.stored()
    for target in TARGETS:
        routers = yield from train_towards(texts, small, target)
        found[f"router.{target}"] = routers.weight.detach().half()
    return found


def small_losses(texts, small: SmallNetworks, batch: TextBatch) -> list[Tensor]:
    """Stage one: divergence from the model's own networks and next-token loss, under random routes."""
    logits = texts.forward(batch.ids, RandomRoutes(small))
    return [divergence(texts, batch, logits), next_token_loss(logits, batch)]


def train_towards(texts, small: SmallNetworks, target: float) -> Iterator:
    """Stage two for one share of large networks; returns the routers."""
    routers = SizeRouters(texts.parts.depth, texts.parts.width)
    for temperature in TEMPERATURES:
        steps = HeadTraining(epochs=1, rate=5e-3, names=("divergence", "distance to the target"))
        losses = partial(router_losses, texts, (small, routers), (target, temperature))
        yield from trained(routers, texts.phase(f"router{target}at{temperature}"), losses, steps)

    def measure(batch: TextBatch) -> Tensor:
        hard = SoftRoutes(small, routers, batch.real, None)
        return torch.stack([distillation(texts, batch, hard), torch.stack(hard.large).mean()])

    moved, large = held_out_mean(texts, measure).tolist()
    yield Note(f"Target {target}: {large:.3f} of the networks taken are large, KL divergence {moved:.4f}.")
    return routers


def router_losses(texts, networks: tuple[SmallNetworks, SizeRouters], aim: tuple[float, float], batch: TextBatch
                  ) -> list[Tensor]:
    """Stage two: divergence of the soft mixture, and the distance of its mean to the target."""
    target, temperature = aim
    steps = SoftRoutes(*networks, batch.real, temperature)
    loss = distillation(texts, batch, steps)
    return [loss, BUDGET * (torch.stack(steps.large).mean() - target).square()]
