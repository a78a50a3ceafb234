"""Training of FiRST: routers that mix every layer with its absence, then adapters for the layers that remain."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from playground.algorithms.adaptive_compute.policy_training import distillation, held_out_mean, next_token_loss
from playground.algorithms.draft_heads.head_training import HeadTraining, trained
from playground.contract import LayerSteps
from playground.events import Note

OPEN = 2.0  # bias of a router at first, so that every layer runs
EXECUTED, UNDECIDED = 0.6, 0.1  # weights of the penalties on running layers and on probabilities between 0 and 1
RANK = 8  # of the adapters
PROTECTED = 1  # layers at either end that are always kept


class LayerRouters(nn.Module):
    """A linear map and a sigmoid before each layer."""

    def __init__(self, depth: int, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(depth, width)), nn.Parameter(torch.full((depth,), OPEN))

    def forward(self, layer: int, hidden: Tensor) -> Tensor:
        """Probability [..., n] that each token needs the layer, from the states [..., n, d] before it."""
        return torch.sigmoid(hidden @ self.weight[layer] + self.bias[layer])

    def decides(self, layer: int) -> bool:
        return PROTECTED <= layer < len(self.bias) - PROTECTED


class MixedLayers(LayerSteps):
    """Every layer is mixed with its absence, token by token."""

    def __init__(self, routers: LayerRouters, real: Tensor):
        self._routers, self._real, self.probabilities = routers, real, []

    def layer(self, layer, hidden, run):
        if not self._routers.decides(layer):
            return run(hidden)
        share = self._routers(layer, hidden)
        self.probabilities.append(share[self._real])
        return share[..., None] * run(hidden) + (1 - share[..., None]) * hidden


class Adapters(nn.Module):
    """Low-rank changes of the feed-forward networks of all layers; none at first."""

    def __init__(self, parts):
        super().__init__()
        weights = [parts.ffn_projections(layer) for layer in range(parts.depth)]
        self._own = [tuple(weight.detach().clone().float() for weight in each) for each in weights]
        sizes = zip(("gate", "up", "down"), self._own[0])
        self.low, self.high = nn.ParameterDict(), nn.ParameterDict()
        for name, weight in sizes:
            rows, columns = weight.shape
            self.low[name] = nn.Parameter(torch.randn(parts.depth, RANK, columns) / columns**0.5)
            self.high[name] = nn.Parameter(torch.zeros(parts.depth, rows, RANK))

    def feed_forward(self, layer: int, normed: Tensor) -> Tensor:
        gate, up, down = (own + self.high[name][layer] @ self.low[name][layer]
                          for name, own in zip(("gate", "up", "down"), self._own[layer]))
        return (silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def stored(self) -> dict[str, Tensor]:
        both = [("a", self.low), ("b", self.high)]
        return {f"{name}.{part}": weight.detach().half() for part, table in both for name, weight in table.items()}


class RoutedLayers(LayerSteps):
    """Each text passes the layers for which the mean probability of its tokens reaches one half."""

    def __init__(self, routers: LayerRouters, real: Tensor, adapters: Adapters | None):
        self._routers, self._real, self._adapters = routers, real, adapters
        self.kept: list[Tensor] = []  # by layer, bool [texts]

    def layer(self, layer, hidden, run):
        if not self._routers.decides(layer):
            return run(hidden)
        votes = (self._routers(layer, hidden) * self._real).sum(1) / self._real.sum(1)
        self.kept.append(votes >= 0.5)
        return torch.where(self.kept[-1][:, None, None], run(hidden), hidden)

    def feed_forward(self, layer, normed, own):
        return self._adapters.feed_forward(layer, normed) if self._adapters else own(normed)


def train_routers(texts) -> Iterator:
    """Both stages; yields figures and notes, and returns the weights by name."""
    routers = LayerRouters(texts.parts.depth, texts.parts.width)
    names = ("next-token loss", "running layers", "undecided")
    steps = HeadTraining(epochs=2, rate=2e-2, names=names)
    yield from trained(routers, texts.phase("routers"), partial(router_losses, texts, routers), steps)
    routers.requires_grad_(False)
    yield Note(measured(texts, routers, None, "before the adapters"))
    adapters = Adapters(texts.parts)
    steps = HeadTraining(epochs=2, rate=2e-3, names=("divergence",))
    yield from trained(adapters, texts.phase("adapters"), partial(adapter_losses, texts, routers, adapters), steps)
    yield Note(measured(texts, routers, adapters, "with them"))
    return {"router.weight": routers.weight.detach().half(), "router.bias": routers.bias.detach().half(),
            **adapters.stored()}


def router_losses(texts, routers: LayerRouters, batch) -> list[Tensor]:
    """Stage one: the loss of the mixed network, a penalty on running layers, and one on undecided routers."""
    steps = MixedLayers(routers, batch.real)
    loss = next_token_loss(texts.forward(batch.ids, steps), batch)
    share = torch.stack(steps.probabilities)
    return [loss, EXECUTED * share.mean(), UNDECIDED * (share * (1 - share)).mean()]


def adapter_losses(texts, routers: LayerRouters, adapters: Adapters, batch) -> list[Tensor]:
    """Stage two: the divergence of the routed network from the whole one."""
    return [distillation(texts, batch, RoutedLayers(routers, batch.real, adapters))]


def measured(texts, routers: LayerRouters, adapters: Adapters | None, when: str) -> str:
    """Layers kept and divergence on held-out texts, in words."""
    def measure(batch) -> Tensor:
        steps = RoutedLayers(routers, batch.real, adapters)
        divergence = distillation(texts, batch, steps)
        return torch.stack([divergence, torch.stack(steps.kept).float().mean()])

    divergence, kept = held_out_mean(texts, measure).tolist()
    return f"Held-out texts {when}: {kept:.3f} of the layers that may be left out run, KL divergence {divergence:.4f}."
